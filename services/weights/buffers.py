"""Host memory that other processes of this machine can map, by path."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import OrderedDict
from pathlib import Path

import torch

from penstock.services.weights.byte_views import from_memory
from penstock.services.weights.transports.shared_memory import directory

KEPT = 4
"""Mappings that a process keeps: mapping a gigabyte anew costs more than reading it."""


class SharedBuffer:
    """``nbytes`` of zeros that live as long as this object and its mappings; they have no name that could be left
    behind."""

    def __init__(self, nbytes: int) -> None:
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("penstock", os.MFD_CLOEXEC)
        else:
            self._file, name = tempfile.mkstemp(dir=directory())
            Path(name).unlink()
        os.truncate(self._file, max(nbytes, 1))
        self._map = mmap.mmap(self._file, max(nbytes, 1))
        self.tensor = from_memory(memoryview(self._map)[:nbytes])
        """uint8 ``[nbytes]``"""
        self.path = path_of(self._file)

    def __del__(self) -> None:
        os.close(self._file)


def path_of(file: int) -> str:
    """What another process of this user opens to see the file that is open here as ``file``, whether or not it still
    has a name."""
    return f"/proc/{os.getpid()}/fd/{file}"


class Mappings:
    """Read-only mappings of other processes' memory, by file, the latest `KEPT` of them."""

    def __init__(self) -> None:
        self._maps: OrderedDict[tuple[int, int], tuple[mmap.mmap, int]] = OrderedDict()
        """Also a file that had a name when it was mapped, to see whether it still has; else -1."""

    def map(self, path: str, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 ``[nbytes]`` from ``offset`` on, read-only. Raises `OSError`."""
        with open(path, "rb") as file:  # noqa: PTH123 - a Path would be resolved to the name, which may be gone
            stat = os.fstat(file.fileno())
            key = stat.st_dev, stat.st_ino
            self._drop(key)
            if key not in self._maps:
                if stat.st_size < offset + nbytes:
                    raise OSError(f"{path} has {stat.st_size} bytes, {offset + nbytes} are wanted")
                named = os.dup(file.fileno()) if stat.st_nlink else -1
                self._maps[key] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), named
        self._maps.move_to_end(key)
        return from_memory(memoryview(self._maps[key][0])[offset : offset + nbytes])

    def _drop(self, wanted: tuple[int, int]) -> None:
        """Lets go of files whose names were removed, and of the oldest: mappings hold their memory."""
        gone = [
            k for k, (_, named) in self._maps.items() if named >= 0 and not os.fstat(named).st_nlink and k != wanted
        ]
        spare = [k for k in self._maps if k not in gone and k != wanted]
        for key in gone + spare[: max(0, len(spare) + 1 - KEPT)]:
            _, named = self._maps.pop(key)
            if named >= 0:
                os.close(named)
