"""A run's folder belongs to one `penstock run` at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


def holder(folder: Path) -> int | None:
    """The process of `penstock run` that is at work in ``folder``; None where there is none."""
    try:
        with (folder / LOCK).open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or 0) or None
    except OSError:
        pass  # no file, or a file system that knows no locks
    return None
