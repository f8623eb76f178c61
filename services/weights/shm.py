"""Shared-memory segments: plain files in the host's memory file system, mapped by sender and receivers.

A segment is written once and never again: a receiver that still reads an old one when it is unlinked keeps its mapping,
so no version is ever overwritten under a reader.
"""

from __future__ import annotations

import mmap
import secrets
import tempfile
from pathlib import Path

from protocols.weights import DigestError

PREFIX = "penstock-"


def directory() -> Path:
    """The memory file system, or the next best thing where there is none."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


class Segment:
    """One segment of this process, removed by `unlink`."""

    def __init__(self, run: str, nbytes: int) -> None:
        self.name = f"{PREFIX}{run}-{secrets.token_hex(6)}"
        self._path = directory() / self.name
        with self._path.open("x+b") as file:
            self._path.chmod(0o600)
            file.truncate(max(1, nbytes))
            self._map = mmap.mmap(file.fileno(), max(1, nbytes))
        self.memory = memoryview(self._map)[:nbytes]

    def unlink(self) -> None:
        """Removes the name; the memory goes when the last mapping does."""
        self._path.unlink(missing_ok=True)


def attach(name: str, nbytes: int) -> memoryview:
    """A read-only view of another process's segment. Raises `DigestError` where there is none of that size."""
    if "/" in name or not name.startswith(PREFIX):
        raise DigestError(f"{name!r} is not a segment of ours")
    try:
        with (directory() / name).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DigestError(f"segment {name} cannot be read on this host: {error.strerror}") from None
    if len(mapped) < nbytes:
        raise DigestError(f"segment {name} has {len(mapped)} bytes, the manifest declares {nbytes}")
    return memoryview(mapped)[:nbytes]


def remove_leftovers(run: str) -> None:
    """Removes the segments that a dead trainer of this run has left."""
    for path in directory().glob(f"{PREFIX}{run}-*"):
        path.unlink(missing_ok=True)
