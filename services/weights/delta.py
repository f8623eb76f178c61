"""A bucket of 16-bit weights as what changed since another version: encoding ``gap-ulp``.

After one optimizer step at the learning rates of RL, most 16-bit weights are bitwise what they were, and those that
changed moved by one or two units in the last place. So a bucket is a list of changes, each a gap and a move:

    header   uint32 changes, uint32 long gaps, uint32 long moves, uint32 flags, then the streams below
    gaps     a byte each: unchanged elements since the change before; 255: the gap stands in ``long gaps``, uint32
    moves    flags 1: all are one unit: a bit each, set for up. Else a byte each: zigzag of the move in units, less one;
             255: the element's new bits stand in ``long moves``, uint16

A unit is one step in the order of the 16-bit floats (sign and magnitude turned into one increasing integer). The result
is bit for bit the new version, which its digest proves.
"""

from __future__ import annotations

import struct

import numpy as np

_HEADER = struct.Struct("<IIII")
_LONG = 255
_UNIT_MOVES = 1


class EncodingError(ValueError):
    """Bytes that are no such list of changes."""


def encode(old: np.ndarray, new: np.ndarray) -> bytes | None:
    """The changes from ``old`` to ``new`` (uint8 ``[bytes]`` of 16-bit elements each); None where sending ``new`` whole
    is smaller."""
    if len(old) != len(new) or len(new) % 2:
        return None
    changes = _changed(old, new)
    if 9 * len(changes) >= 8 * len(new):  # no encoding of so many is smaller
        return None
    before, after = old.view(np.uint16)[changes], new.view(np.uint16)[changes]
    gaps = np.diff(changes, prepend=-1) - 1
    moves = _ordered(after) - _ordered(before)
    zigzag = np.where(moves > 0, 2 * moves - 2, -2 * moves - 1)
    long_gaps = gaps >= _LONG
    streams = [np.where(long_gaps, _LONG, gaps).astype(np.uint8).tobytes()]
    if not (zigzag > 1).any():
        long_moves, flags = np.zeros(len(changes), bool), _UNIT_MOVES
        streams.append(np.packbits(moves > 0).tobytes())
    else:
        long_moves, flags = zigzag >= _LONG, 0
        streams.append(np.where(long_moves, _LONG, zigzag).astype(np.uint8).tobytes())
    streams.append(gaps[long_gaps].astype("<u4").tobytes())
    streams.append(after[long_moves].astype("<u2").tobytes())
    header = _HEADER.pack(len(changes), int(long_gaps.sum()), int(long_moves.sum()), flags)
    encoded = b"".join([header, *streams])
    return encoded if len(encoded) < len(new) else None


def changes_in(encoded: bytes | memoryview) -> int:
    """How many elements it changes."""
    return _HEADER.unpack_from(encoded)[0]


def apply(encoded: bytes | memoryview, bucket: np.ndarray) -> None:
    """Turns ``bucket`` (uint8 ``[bytes]``), which holds the old version, into the new one. Raises `EncodingError` on
    anything that does not fit."""
    try:
        count, long_gaps, long_moves, flags = _HEADER.unpack_from(encoded)
        at = _HEADER.size
        gaps = np.frombuffer(encoded, np.uint8, count, at).astype(np.int64)
        at += count
        packed = -(-count // 8) if flags & _UNIT_MOVES else count
        moves = np.frombuffer(encoded, np.uint8, packed, at)
        at += packed
        wide_gaps = np.frombuffer(encoded, "<u4", long_gaps, at)
        at += 4 * long_gaps
        wide_moves = np.frombuffer(encoded, "<u2", long_moves, at)
        at += 2 * long_moves
    except (struct.error, ValueError) as error:
        raise EncodingError(f"a list of changes is cut short: {error}") from None
    if at != len(encoded) or flags not in (0, _UNIT_MOVES):
        raise EncodingError(f"a list of changes has {len(encoded)} bytes where {at} are declared")
    wide = gaps == _LONG
    if wide.sum() != long_gaps:
        raise EncodingError(f"{int(wide.sum())} long gaps where {long_gaps} are declared")
    gaps[wide] = wide_gaps
    places = np.cumsum(gaps + 1) - 1
    elements = bucket.view(np.uint16)
    if count and places[-1] >= len(elements):
        raise EncodingError(f"element {int(places[-1])} is changed, and there are {len(elements)}")
    old = elements[places]
    if flags & _UNIT_MOVES:
        steps = np.unpackbits(moves, count=count).astype(np.int64) * 2 - 1
        elements[places] = _unordered(_ordered(old) + steps)
        return
    zigzag = moves.astype(np.int64)
    steps = np.where(zigzag % 2 == 0, zigzag // 2 + 1, -(zigzag + 1) // 2)
    new = _unordered(_ordered(old) + steps)
    wide = moves == _LONG
    if wide.sum() != long_moves:
        raise EncodingError(f"{int(wide.sum())} long moves where {long_moves} are declared")
    new[wide] = wide_moves
    elements[places] = new


def _changed(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Indices of the 16-bit elements that differ, int64. Eight bytes are compared at once: most are equal."""
    whole = len(new) // 8 * 8
    words = np.flatnonzero(old[:whole].view(np.uint64) != new[:whole].view(np.uint64))
    candidates = (words[:, None] * 4 + np.arange(4)).ravel()
    tail = np.arange(whole // 2, len(new) // 2)
    candidates = np.concatenate([candidates, tail])
    return candidates[old.view(np.uint16)[candidates] != new.view(np.uint16)[candidates]]


def _ordered(bits: np.ndarray) -> np.ndarray:
    """16-bit floats as integers (int64) that increase with them; -0 and 0 stay apart."""
    values = bits.astype(np.int64)
    return np.where(values & 0x8000, 0x7FFF - values, values)


def _unordered(values: np.ndarray) -> np.ndarray:
    return np.where(values < 0, 0x7FFF - values, values).astype(np.uint16)
