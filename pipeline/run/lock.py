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
        file.write(f"{os.getpid()} {psutil.Process().create_time()}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def holder(folder: Path) -> int | None:
    """The process of `penstock run` that is at work in ``folder``; None where there is none."""
    try:  # the lock itself is left alone: who tries it keeps others from starting
        pid, began = (folder / LOCK).read_text().split()
        return int(pid) if psutil.Process(int(pid)).create_time() == float(began) else None
    except (OSError, ValueError, psutil.Error):
        return None
