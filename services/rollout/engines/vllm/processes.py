"""The processes that a vLLM of this one has started."""

from __future__ import annotations

from collections.abc import Sequence

import psutil


def started_since(before: set[psutil.Process]) -> list[psutil.Process]:
    """Children of this process that were not there ``before``, but for Python's own tracker of shared memory."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process not in before and not any("resource_tracker" in word for word in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found


def wrong_with(processes: Sequence[psutil.Process]) -> str:
    """Those that are dead or stopped, by name."""
    bad = []
    for process in processes:
        try:
            status = process.status()
            if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED, psutil.STATUS_DEAD):
                bad.append(f"{process.name()} {process.pid} is {status}")
        except psutil.NoSuchProcess:
            bad.append(f"process {process.pid} is gone")
    return f" ({', '.join(bad)})" if bad else ""


def end_all(processes: Sequence[psutil.Process], within_s: float) -> None:
    """They are killed, and gone: whoever gets their devices next finds the memory free."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(processes, within_s)
