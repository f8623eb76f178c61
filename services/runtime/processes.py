"""What a process asks of the system: to end with its parent, to open many files."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
POLL_S = 1.0


def with_parent(number: int = signal.SIGTERM) -> Callable[[], None] | None:
    """For `subprocess.Popen`'s ``preexec_fn``: the child, a program that is not ours, gets this signal when its parent
    ends. None where the system has no such thing (it is Linux's)."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, number)


def die_with_parent(number: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Called by a process of ours: it gets the signal ``number`` when its parent has ended, also while it hangs.
    ``parent``: its parent's PID; None where that cannot have ended before this call."""
    parent = os.getppid() if parent is None else parent
    ask = with_parent(number)
    if ask:
        ask()
        if os.getppid() != parent:  # it ended just before
            os.kill(os.getpid(), number)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def raise_file_limit() -> None:
    """This process may open as many files and sockets as the system lets it: a broker has one for every actor, and who
    joins a checkpoint several for every rank."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
