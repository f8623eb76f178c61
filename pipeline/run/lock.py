"""A run's folder belongs to one `penstock run` at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.pipeline.config import ConfigError


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Nobody else runs in ``folder`` meanwhile; the kernel gives it free when this process ends, however that is.
    Raises `ConfigError` where somebody does."""
    with (folder / "run.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--resume: the run in {folder} is going on already; watch it with: penstock top {folder}"
            ) from None
        except OSError:
            pass  # a file system that knows no locks
        yield
