"""Locks of files in a run's folder, which the kernel takes from a process that dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from penstock.services.runtime.errors import SetupError

OWNER_BYTES = 200

_open: set[int] = set()


def _close_in_child() -> None:
    """A child that was forked would hold its parent's locks after the parent's death."""
    while _open:
        os.close(_open.pop())


os.register_at_fork(after_in_child=_close_in_child)


class Lock:
    """One file; ``name`` is who locks it, for people."""

    def __init__(self, path: Path, name: str = "") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._name = path, name or path.stem
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._mine = False
        _open.add(self._file)

    def take(self, shared: bool = False) -> bool:
        """Whether it is this process's now, or was already; who waits for it can read whose it is. Raises `SetupError`
        where the file system has no locks."""
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise SetupError(
                f"run.placement=colocated: {self._path} cannot be locked ({error.strerror}); let run.folder lie on a "
                "file system that has flock"
            ) from None
        if not shared and not self._mine:
            self._mine = True
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{self._name} (pid {os.getpid()})".encode(), 0)
        return True

    def give(self) -> None:
        self._mine = False
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def is_taken(self) -> bool:
        """By somebody else."""
        if not self._mine and self.take(shared=True):
            self.give()
            return False
        return not self._mine

    @property
    def owner(self) -> str:
        """Who took it last, for people."""
        return os.pread(self._file, OWNER_BYTES, 0).decode(errors="replace") or f"{self._path.stem} (pid ?)"


class Others:
    """The locks of one kind of a device, whoever has made them, but for ranks of the learner ``besides``."""

    def __init__(self, folder: Path, kind: str, besides: str = "") -> None:
        self._folder, self._kind, self._besides = folder, kind, besides
        self._known: dict[Path, Lock] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def busy(self) -> list[Lock]:
        """Those that are taken."""
        for path in self._folder.iterdir():
            mine = self._besides and path.stem.partition("-")[0] == self._besides
            if path.suffix == self._kind and not mine and path not in self._known:
                self._known[path] = Lock(path)
        return [lock for lock in self._known.values() if lock.is_taken()]
