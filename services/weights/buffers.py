"""Host memory that versions lie in: this process's buffers, and other processes' as they are, without a copy.

A buffer with a name is a segment: a file in the host's memory file system, a page of header and the flat buffer. While
a receiver reads or serves from it, it holds a shared lock on the file, which the kernel releases when the process dies;
the sender writes a segment anew only where it gets the exclusive lock. So no version is ever overwritten under a
reader, however long that reader is stopped.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.protocols.versions import DigestError
from penstock.services.modeling.pinned import pin, unpin
from penstock.services.runtime.errors import SetupError
from penstock.services.weights.byte_views import from_memory
from penstock.services.weights.transports.shared_memory import SEGMENTS, directory, is_ours, new_name

HEADER_BYTES = 4096
_MAGIC = b"penstock-weights"
_VERSION, _FILLED = 0, 1
"""Places of the header's two 64-bit numbers after the magic, each written in one store: a reader sees the old number or
the new one, never something in between."""
MAPPINGS = 4
"""Mappings that a process keeps: mapping a gigabyte anew costs more than reading it."""


class HostBuffer:
    """``nbytes`` of this process, zeros at first, that live as long as this object and its mappings. Where they are
    ``shared``, other processes can map them, by `path`; with a ``name`` they are a segment, which `unlink` removes.
    With a ``path`` they are another process's, mapped to be written to; raises `OSError` where they are fewer."""

    def __init__(self, nbytes: int, shared: bool = False, name: str = "", path: str = "") -> None:
        self.name, self.path, self._file = name, path, -1
        self._pinned: bool | None = None
        """False: CUDA would not."""
        self.offset = HEADER_BYTES if name else 0
        """Where in the file the flat buffer begins."""
        if not shared and not name and not path:
            self.tensor = torch.zeros(nbytes, dtype=torch.uint8)
            """uint8 ``[nbytes]``"""
            return
        if path:
            self._file = _open_unnamed(path, nbytes)
        else:
            self._file = _create_segment(name, nbytes) if name else _create_unnamed(nbytes)
            self.path = path_of(self._file)
        self._map = mmap.mmap(self._file, self.offset + nbytes)
        self.tensor = from_memory(memoryview(self._map)[self.offset :])

    def begin(self, version: int) -> bool:
        """Makes it ready to be filled with ``version``. False where a receiver still holds it."""
        if not self.name:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        numbers = _numbers(memoryview(self._map))
        self._map[: len(_MAGIC)] = _MAGIC
        numbers[_VERSION], numbers[_FILLED] = version, 0
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return True

    def filled(self, buckets: int) -> None:
        """The first ``buckets`` buckets of a segment are written."""
        if self.name:
            _numbers(memoryview(self._map))[_FILLED] = buckets

    def pin(self) -> None:
        """Registers it with CUDA, where there is one."""
        self._pinned = pin(self.tensor) if self._pinned is None else self._pinned

    @property
    def registered(self) -> bool:
        """With CUDA."""
        return bool(self._pinned)

    @property
    def inode(self) -> int:
        """Of its file, by which the same memory is known under every path."""
        return os.fstat(self._file).st_ino

    @property
    def is_named(self) -> bool:
        """A segment whose name still leads to it: whoever cleans up the memory file system may take it."""
        try:
            return bool(self.name) and (directory() / self.name).stat().st_ino == self.inode
        except FileNotFoundError:
            return False

    def unlink(self) -> None:
        """Removes a segment's name; the memory goes when the last mapping does."""
        if self.name:
            (directory() / self.name).unlink(missing_ok=True)

    def __del__(self) -> None:
        if self._pinned:
            unpin(self.tensor)
        if self._file >= 0:
            os.close(self._file)


class MappedBuffer:
    """A receiver's hold on another process's segment, until `release`. Raises `DigestError` where the segment is of
    another size or is being made ready, `OSError` where there is none."""

    offset = HEADER_BYTES
    """Where in the file the flat buffer begins."""

    def __init__(self, path: Path, nbytes: int, mappings: Mappings) -> None:
        self._name, self._lock = path.name, path.open("rb")
        try:
            stat = os.fstat(self._lock.fileno())
            if stat.st_size < HEADER_BYTES + nbytes:
                raise DigestError(
                    f"segment {path.name} has {stat.st_size - HEADER_BYTES} bytes, the layout declares {nbytes}"
                )
            # Mapped by a file of its own: a mapping keeps its file open, and with it that file's locks.
            mapped, inode = mappings.map_file(path, HEADER_BYTES + nbytes)
            if inode != stat.st_ino:
                raise DigestError(f"segment {path.name} was replaced")
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise DigestError(f"segment {path.name} is being made ready for another version") from None
        except (DigestError, OSError):
            self.release()
            raise
        self.path = path_of(self._lock.fileno())
        self.tensor = from_memory(mapped[HEADER_BYTES : HEADER_BYTES + nbytes])
        """uint8 ``[nbytes]``, read-only."""
        self._header = mapped[:HEADER_BYTES]

    def filled(self, version: int) -> int:
        """How many buckets of ``version`` are written. Raises `DigestError` where it holds another version by now."""
        found, buckets = _numbers(self._header)
        if self._header[: len(_MAGIC)] != _MAGIC or found != version:
            raise DigestError(f"segment {self._name} holds version {found}, not {version}")
        return buckets

    def release(self) -> None:
        """The sender may fill the segment anew."""
        self._lock.close()


class BufferPool:
    """The buffers of one sender or one receiver, filled in turn: segments of ``run_key``, where there is one; else
    buffers that are ``shared`` or private."""

    def __init__(self, shared: bool = False, run_key: str | None = None) -> None:
        self._shared, self._run_key = shared, run_key
        self._buffers: list[HostBuffer] = []

    def take(self, nbytes: int, keep: Sequence[HostBuffer | MappedBuffer], version: int = 0) -> HostBuffer:
        """One to fill with ``version``, that nobody holds and that is not in ``keep``: a new one where there is none.
        Of spare ones only segments stay, the latest `SEGMENTS` of them. Raises `SetupError` where there is no room."""
        self._buffers = [b for b in self._buffers if not b.name or b.is_named]
        free = (b for b in self._buffers if b not in keep and b.tensor.numel() == nbytes and b.begin(version))
        taken = next(free, None)
        if taken is None:
            taken = HostBuffer(nbytes, self._shared, new_name(self._run_key) if self._run_key else "")
            taken.begin(version)
        stay = [b for b in self._buffers if b is not taken and (b.name or b in keep or b.registered)]
        self._buffers = [*stay, taken]
        for old in self._buffers[:-SEGMENTS]:
            old.unlink()
        del self._buffers[:-SEGMENTS]
        return taken

    def register(self, nbytes: int, count: int) -> None:
        """Has ``count`` buffers of this size ready that are registered with CUDA, which takes long: page by page."""
        known = [buffer for buffer in self._buffers if buffer.tensor.numel() == nbytes]
        self._buffers += [HostBuffer(nbytes, self._shared) for _ in range(count - len(known))]
        for buffer in self._buffers:
            buffer.pin()

    def close(self) -> None:
        """Lets go of them, and removes the segments."""
        for buffer in self._buffers:
            buffer.unlink()
        self._buffers.clear()


class Mappings:
    """Read-only mappings of other processes' memory, by file, the latest `MAPPINGS` of them."""

    def __init__(self) -> None:
        self._maps: OrderedDict[tuple[int, int], tuple[mmap.mmap, int]] = OrderedDict()
        """Also a file that had a name when it was mapped, to see whether it still has; else -1."""

    def attach(self, name: str, nbytes: int) -> MappedBuffer:
        """A hold on segment ``name``. Raises `DigestError` where there is none of that size."""
        if not is_ours(name):
            raise DigestError(f"{name!r} is not a segment of ours")
        try:
            return MappedBuffer(directory() / name, nbytes, self)
        except OSError as error:
            raise DigestError(f"segment {name} cannot be read on this host: {error.strerror}") from None

    def map(self, path: str, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 ``[nbytes]`` from ``offset`` on, read-only. Raises `OSError`."""
        return from_memory(self.map_file(path, offset + nbytes)[0][offset : offset + nbytes])

    def map_file(self, path: str | Path, nbytes: int) -> tuple[memoryview, int]:
        """A whole file of at least ``nbytes``, and its inode. Raises `OSError`."""
        with open(path, "rb") as file:  # noqa: PTH123 - a Path would be resolved to the name, which may be gone
            stat = os.fstat(file.fileno())
            key = stat.st_dev, stat.st_ino
            self._drop(key)
            if stat.st_size < nbytes:
                raise OSError(f"{path} has {stat.st_size} bytes, {nbytes} are wanted")
            if key not in self._maps:
                named = os.dup(file.fileno()) if stat.st_nlink else -1
                self._maps[key] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), named
        self._maps.move_to_end(key)
        return memoryview(self._maps[key][0]), stat.st_ino

    def _drop(self, wanted: tuple[int, int]) -> None:
        """Lets go of files whose names were removed, and of the oldest: mappings hold their memory."""
        gone = [
            k for k, (_, named) in self._maps.items() if named >= 0 and not os.fstat(named).st_nlink and k != wanted
        ]
        spare = [k for k in self._maps if k not in gone and k != wanted]
        for key in gone + spare[: max(0, len(spare) + 1 - MAPPINGS)]:
            self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        _, named = self._maps.pop(key)
        if named >= 0:
            os.close(named)

    def __del__(self) -> None:
        for key in list(self._maps):  # an open file holds its memory too
            self._forget(key)


def path_of(file: int) -> str:
    """What another process of this user, in the same `neighbourhood`, opens to see the file that is open here as
    ``file``, whether or not it still has a name."""
    return f"/proc/{os.getpid()}/fd/{file}"


def neighbourhood() -> str:
    """The same for processes of one machine that know each other's numbers: not for two containers. Empty where that
    cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _numbers(header: memoryview) -> memoryview:
    return header[len(_MAGIC) : len(_MAGIC) + 16].cast("q")


def _create_segment(name: str, nbytes: int) -> int:
    path, size = directory() / name, HEADER_BYTES + nbytes
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:  # reserved now: a memory file system that fills up later would be a SIGBUS
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:
            os.truncate(file, size)
    except OSError as error:
        path.unlink()
        os.close(file)
        raise SetupError(
            f"weights.transport: no room for {nbytes / 2**20:.0f} MiB in {directory()} ({error.strerror}); "
            f"{SEGMENTS} versions must fit (docker: --shm-size; compose: PENSTOCK_SHM)"
        ) from None
    return file


def _open_unnamed(path: str, nbytes: int) -> int:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    size = os.fstat(file).st_size
    if size < nbytes:
        os.close(file)
        raise OSError(f"{path} has {size} bytes, {nbytes} are wanted")
    return file


def _create_unnamed(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("penstock", os.MFD_CLOEXEC)
    else:
        file, name = tempfile.mkstemp(dir=directory())
        Path(name).unlink()
    os.truncate(file, nbytes)
    return file
