"""Shared-memory segments: plain files in the host's memory file system, mapped by the sender and by receivers that use
them as they are, without a copy.

A segment is a page of header and the flat buffer. While a receiver reads or serves from it, it holds a shared lock on
the file, which the kernel releases when the process dies; the sender writes a segment anew only where it gets the
exclusive lock. So no version is ever overwritten under a reader, however long that reader is stopped.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from penstock.protocols.versions import DigestError
from penstock.services.runtime.errors import SetupError

PREFIX = "penstock-"
HEADER_BYTES = 4096
_MAGIC = b"penstock-weights"
_VERSION, _FILLED = 0, 1
"""Places of the header's two 64-bit numbers after the magic, each written in one store: a reader sees the old number or
the new one, never something in between."""
NONCE_BYTES = 16
SEGMENTS = 4
"""Segments that have a name at once; where all are in use, the oldest loses its name and lives on with its readers."""


def directory() -> Path:
    """The memory file system, or the next best thing where there is none."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


class Segment:
    """One segment of this process, removed by `unlink`."""

    def __init__(self, run_key: str, nbytes: int) -> None:
        self.name = f"{_prefix(run_key)}{secrets.token_hex(6)}"
        self._path = directory() / self.name
        self._file = self._path.open("x+b")
        self._path.chmod(0o600)
        size = HEADER_BYTES + nbytes
        try:  # reserved now: a memory file system that fills up later would be a SIGBUS
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), 0, size)
            else:
                self._file.truncate(size)
        except OSError as error:
            self._path.unlink()
            self._file.close()
            raise SetupError(
                f"weights.transport: no room for {nbytes / 2**20:.0f} MiB in {directory()} ({error.strerror}); "
                f"{SEGMENTS} versions must fit (docker: --shm-size; compose: PENSTOCK_SHM)"
            ) from None
        self._map = mmap.mmap(self._file.fileno(), size)
        self.memory = memoryview(self._map)[HEADER_BYTES:]
        self._numbers = _numbers(self._map)

    def begin(self, version: int) -> bool:
        """Makes it ready to be filled with ``version``. False where a receiver still holds it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._map[: len(_MAGIC)] = _MAGIC
        self._numbers[_VERSION], self._numbers[_FILLED] = version, 0
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return True

    def filled(self, buckets: int) -> None:
        """The first ``buckets`` buckets are written."""
        self._numbers[_FILLED] = buckets

    def unlink(self) -> None:
        """Removes the name; the memory goes when the last mapping does."""
        self._path.unlink(missing_ok=True)
        self._file.close()


class Pool:
    """The segments of one sender, filled in turn."""

    def __init__(self, run_key: str) -> None:
        self._run_key = run_key
        self._segments: list[Segment] = []

    def take(self, version: int, nbytes: int, keep: Sequence[Segment | None]) -> Segment:
        """A segment to fill with ``version``: one that nobody holds and that is not in ``keep``, or a new one."""
        for segment in self._segments:
            if segment not in keep and len(segment.memory) == nbytes and segment.begin(version):
                self._segments.remove(segment)
                self._segments.append(segment)
                return segment
        segment = Segment(self._run_key, nbytes)
        segment.begin(version)
        self._segments.append(segment)
        for old in self._segments[:-SEGMENTS]:
            old.unlink()
        del self._segments[:-SEGMENTS]
        return segment

    def close(self) -> None:
        """Removes all of them."""
        for segment in self._segments:
            segment.unlink()
        self._segments.clear()


class Attached:
    """A receiver's hold on another process's segment, until `release`. ``memory`` is read-only."""

    def __init__(self, mapping: _Mapping, nbytes: int) -> None:
        self._mapping = mapping
        self._lock: IO[bytes] | None = mapping.path.open("rb")
        if os.fstat(self._lock.fileno()).st_ino != mapping.inode:
            self.release()
            raise DigestError(f"segment {mapping.path.name} was replaced")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise DigestError(f"segment {mapping.path.name} is being made ready for another version") from None
        self.memory = memoryview(mapping.map)[HEADER_BYTES : HEADER_BYTES + nbytes]
        self._numbers = _numbers(mapping.map)

    @property
    def file(self) -> int:
        """The open file; the flat buffer begins at `HEADER_BYTES`."""
        assert self._lock
        return self._lock.fileno()

    def filled(self, version: int) -> int:
        """How many buckets of ``version`` are written. Raises `DigestError` where it holds another version by now."""
        found, buckets = self._numbers
        if self._mapping.map[: len(_MAGIC)] != _MAGIC or found != version:
            raise DigestError(f"segment {self._mapping.path.name} holds version {found}, not {version}")
        return buckets

    def release(self) -> None:
        """The sender may fill the segment anew."""
        if self._lock:
            self._lock.close()
            self._lock = None


def _numbers(mapped: mmap.mmap) -> memoryview:
    return memoryview(mapped)[len(_MAGIC) : len(_MAGIC) + 16].cast("q")


class _Mapping:
    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_size < HEADER_BYTES + nbytes:
                raise DigestError(
                    f"segment {path.name} has {stat.st_size - HEADER_BYTES} bytes, the layout declares {nbytes}"
                )
            self.inode = stat.st_ino
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class Attachments:
    """A receiver's mappings, kept while the segments exist: mapping a gigabyte anew costs more than reading it."""

    def __init__(self) -> None:
        self._mappings: dict[str, _Mapping] = {}

    def attach(self, name: str, nbytes: int) -> Attached:
        """A hold on segment ``name``. Raises `DigestError` where there is none of that size."""
        if "/" in name or not name.startswith(PREFIX):
            raise DigestError(f"{name!r} is not a segment of ours")
        path = directory() / name
        for known in [n for n in self._mappings if not (directory() / n).exists()]:
            del self._mappings[known]
        try:
            if name not in self._mappings:
                self._mappings[name] = _Mapping(path, nbytes)
            return Attached(self._mappings[name], nbytes)
        except OSError as error:
            raise DigestError(f"segment {name} cannot be read on this host: {error.strerror}") from None


class Probe:
    """A nonce in a segment of its own: who can read it shares this host's memory."""

    def __init__(self, run_key: str) -> None:
        self.nonce = secrets.token_hex(NONCE_BYTES)
        self._path = directory() / f"{_prefix(run_key)}probe-{secrets.token_hex(6)}"
        self.name = self._path.name
        self._path.touch(0o600, exist_ok=False)
        self._path.write_text(self.nonce)

    def unlink(self) -> None:
        """Removes it."""
        self._path.unlink(missing_ok=True)


def read_probe(name: str) -> str:
    """The nonce in the probe ``name``; empty where this process does not see it."""
    if "/" in name or not name.startswith(PREFIX):
        return ""
    try:
        return (directory() / name).read_text()[: 2 * NONCE_BYTES]
    except OSError:
        return ""


def remove_leftovers(run_key: str) -> None:
    """Removes the segments that a dead trainer of this run has left."""
    for path in directory().glob(f"{_prefix(run_key)}*"):
        path.unlink(missing_ok=True)


def _prefix(run_key: str) -> str:
    # A digest of the key: names are for every process of this host to see, the key is not.
    return f"{PREFIX}{hashlib.sha256(run_key.encode()).hexdigest()[:16]}-"
