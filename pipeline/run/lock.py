"""A run's folder belongs to one `penstock run` at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from penstock.pipeline.config import ConfigError

LOCK = "run.lock"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Nobody else runs in ``folder`` meanwhile; the kernel gives it free when this process ends, however that is.
    Raises `ConfigError` where somebody does."""
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--resume: the run in {folder} is going on already; watch it with: penstock top {folder}"
            ) from None
        except OSError:
            pass  # a file system that knows no locks
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
        file.truncate(0)


def holder(folder: Path) -> int | None:
    """The process of `penstock run` that is at work in ``folder``; None where there is none."""
    try:  # the lock itself is left alone: who tries it keeps others from starting
        pid = int((folder / LOCK).read_text() or 0)
        return pid if pid and "run" in psutil.Process(pid).cmdline() else None
    except (OSError, ValueError, psutil.Error):
        return None
