"""Whether somebody is at work on a run, and what it came to, as the run's folder says. Imports no torch."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

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


def read_summary(folder: Path) -> dict[str, Any] | None:
    """What the run in ``folder`` came to; None while it is not over, or where its file was cut short: a run that is
    resumed writes it again."""
    try:
        found = json.loads((folder / "summary.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def came_to(folder: Path) -> dict[str, Any] | None:
    """The same of the run as it is now: None also while somebody goes on with it, who looks at its setup yet."""
    return None if is_of_before(folder, folder / "summary.json") else read_summary(folder)
