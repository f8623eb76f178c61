"""Whether somebody is at work on a run, as the run's folder says. Imports no torch."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil

LOCK = "run.lock"


def machine() -> str:
    """This machine, since it was started; of containers, all of them."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def holder(folder: Path) -> int | None:
    """The process of `penstock run` that is at work in ``folder``; None where there is none."""
    try:  # the lock itself is left alone: who tries it keeps others from starting
        pid, began, *of = (folder / LOCK).read_text().split()
        if of and of != [machine()]:
            return None
        return int(pid) if psutil.Process(int(pid)).create_time() == float(began) else None
    except (OSError, ValueError, psutil.Error):
        return None


def is_of_before(folder: Path, file: Path) -> bool:
    """A `penstock run` of this machine is at work in ``folder``, and ``file`` there is of an earlier start: it was
    written before this one took the lock."""
    try:
        return holder(folder) is not None and file.stat().st_mtime_ns < (folder / LOCK).stat().st_mtime_ns
    except OSError:
        return False
