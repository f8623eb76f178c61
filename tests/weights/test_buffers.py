"""Buffers on the host: which may be filled next, who may map them, and when their memory goes."""

from __future__ import annotations

import gc
import os
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.protocols.versions import DigestError
from penstock.services.runtime.errors import SetupError
from penstock.services.weights.buffers import HEADER_BYTES, SEGMENTS, BufferPool, HostBuffer, Mappings
from penstock.services.weights.transports.shared_memory import directory, new_name

NBYTES = 8192


@pytest.fixture
def segments() -> Iterator[BufferPool]:
    pool = BufferPool(run_key=f"test-buffers-{os.getpid()}")
    yield pool
    pool.close()


def deleted_mappings(name: str) -> int:
    return sum(f"{name} (deleted)" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_spare_private_buffers_are_let_go_of_and_kept_ones_are_not_filled() -> None:
    pool = BufferPool()
    first = pool.take(NBYTES, [])
    second = pool.take(NBYTES, [first])
    third = pool.take(NBYTES, [first, second])
    assert len({id(first), id(second), id(third)}) == 3
    gone = weakref.ref(first)
    del first
    assert pool.take(NBYTES, [second, third]) is gone()
    assert pool.take(NBYTES, [third]) in (gone(), second)
    assert pool.take(2 * NBYTES, [third]).tensor.numel() == 2 * NBYTES
    gc.collect()
    assert gone() is None


def test_a_segment_is_only_ours_to_read_and_its_memory_goes_with_its_last_mapping(segments: BufferPool) -> None:
    segment = segments.take(NBYTES, [], 1)
    assert stat.S_IMODE((directory() / segment.name).stat().st_mode) == 0o600
    mappings = Mappings()
    reader = mappings.attach(segment.name, NBYTES)
    segment.tensor[7] = 3
    assert reader.tensor[7] == 3
    segments.close()
    name = segment.name
    assert deleted_mappings(name) == 2
    del segment, reader
    mappings.map_file(__file__, 1)  # lets go of what has lost its name
    assert deleted_mappings(name) == 0
    assert not [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink() and name in str(file.readlink())]


def test_a_hold_ends_with_its_release_though_the_mapping_stays(segments: BufferPool) -> None:
    segment, mappings = segments.take(NBYTES, [], 1), Mappings()
    first, second = mappings.attach(segment.name, NBYTES), mappings.attach(segment.name, NBYTES)
    assert first.tensor.data_ptr() == second.tensor.data_ptr(), "mapped once"
    first.release()
    assert not segment.begin(2), "the second still holds it"
    second.release()
    assert segment.begin(2)


def test_segments_that_are_held_are_not_taken_and_the_oldest_loses_its_name(segments: BufferPool) -> None:
    mappings, held, taken = Mappings(), [], []
    for version in range(SEGMENTS + 1):
        taken.append(segments.take(NBYTES, [], version))
        held.append(mappings.attach(taken[-1].name, NBYTES))
    assert len({segment.name for segment in taken}) == SEGMENTS + 1
    assert [(directory() / segment.name).exists() for segment in taken] == [False] + SEGMENTS * [True]
    assert [reader.filled(version) for version, reader in enumerate(held)] == [0] * len(held)
    held[2].release()
    assert segments.take(NBYTES, [], 9) is taken[2]


def test_segments_of_another_size_or_that_were_replaced_are_refused(
    segments: BufferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment, other, mappings = segments.take(NBYTES, [], 1), HostBuffer(NBYTES, shared=True), Mappings()
    with pytest.raises(DigestError, match=f"has {NBYTES} bytes, the layout declares {NBYTES + 1}"):
        mappings.attach(segment.name, NBYTES + 1)
    monkeypatch.setattr(
        mappings, "map_file", lambda path, nbytes: Mappings.map_file(mappings, other.path, nbytes - HEADER_BYTES)
    )
    with pytest.raises(DigestError, match="was replaced"):
        mappings.attach(segment.name, NBYTES)
    assert segment.begin(2), "a hold that was refused holds nothing"


def test_no_room_for_a_segment_is_said_before_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    run_key = f"test-no-room-{os.getpid()}"
    mine = f"{new_name(run_key).rpartition('-')[0]}-*"
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SetupError, match=r"weights.transport: no room for 1 MiB in .*No space left on device"):
        BufferPool(run_key=run_key).take(2**20, [])
    assert not list(directory().glob(mine))


def test_a_shared_buffer_is_mapped_by_its_path() -> None:
    buffer, mappings = HostBuffer(NBYTES, shared=True), Mappings()
    buffer.tensor[5] = 9
    assert mappings.map(buffer.path, 5, 1).tolist() == [9]
    with pytest.raises(OSError, match=f"has {NBYTES} bytes, {NBYTES + 1} are wanted"):
        mappings.map(buffer.path, 1, NBYTES)
