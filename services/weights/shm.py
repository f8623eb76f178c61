"""Shared-memory segments: plain files in the host's memory file system, mapped by sender and receivers.

A segment is written once and never again: a receiver that still reads an old one when it is unlinked keeps its mapping,
so no version is ever overwritten under a reader.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import tempfile
from pathlib import Path

from protocols.weights import DigestError
from services.section import SetupError

PREFIX = "penstock-"


def directory() -> Path:
    """The memory file system, or the next best thing where there is none."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


class Segment:
    """One segment of this process, removed by `unlink`."""

    def __init__(self, run_key: str, nbytes: int) -> None:
        self.name = f"{_prefix(run_key)}{secrets.token_hex(6)}"
        self._path = directory() / self.name
        with self._path.open("x+b") as file:
            self._path.chmod(0o600)
            try:  # reserved now: a memory file system that fills up later would be a SIGBUS
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, max(1, nbytes))
                else:
                    file.truncate(max(1, nbytes))
            except OSError as error:
                self._path.unlink()
                raise SetupError(
                    f"weights.transport: no room for {nbytes / 2**20:.0f} MiB in {directory()} ({error.strerror}); "
                    "four versions must fit (docker: --shm-size)"
                ) from None
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


def remove_leftovers(run_key: str) -> None:
    """Removes the segments that a dead trainer of this run has left."""
    for path in directory().glob(f"{_prefix(run_key)}*"):
        path.unlink(missing_ok=True)


def _prefix(run_key: str) -> str:
    # A digest of the key: names are for every process of this host to see, the key is not.
    return f"{PREFIX}{hashlib.sha256(run_key.encode()).hexdigest()[:16]}-"
