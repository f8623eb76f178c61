"""What a user process and its parent say to each other: length-prefixed `protocols.wire.pack` buffers over pipes, and
a word of shared memory."""

from __future__ import annotations

import mmap
import struct
from typing import Any, BinaryIO

from penstock.protocols.wire import pack, unpack

_LENGTH = struct.Struct("<I")
_MARK = struct.Struct("<q")
NOBODY = -1


def make_frame(value: Any) -> bytes:
    """One value as it is sent."""
    data = pack(value)
    return _LENGTH.pack(len(data)) + data


def write_frame(stream: BinaryIO, value: Any) -> None:
    """Sends one value."""
    stream.write(make_frame(value))
    stream.flush()


def frame_size(received: bytes | bytearray) -> int | None:
    """Bytes of the first frame in ``received``, its length included; None where not even that has arrived."""
    return _LENGTH.unpack(received[: _LENGTH.size])[0] + _LENGTH.size if len(received) >= _LENGTH.size else None


def read_frame(stream: BinaryIO) -> Any:
    """Receives one value; None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return unpack(stream.read(_LENGTH.unpack(head)[0]))


class Mark:
    """The call whose code runs right now. So the parent knows whom a crash or a hang belongs to. ``file`` is a
    descriptor of shared memory."""

    def __init__(self, file: int) -> None:
        self._map = mmap.mmap(file, mmap.PAGESIZE)

    def set(self, call: int) -> None:
        """``call`` runs now, or `NOBODY`."""
        _MARK.pack_into(self._map, 0, call)

    def read(self) -> int:
        """The call that runs, or ran when the process ended."""
        return _MARK.unpack_from(self._map, 0)[0]
