"""Ends a process whose main loop has stopped to turn: an engine, a device or a user's code that does not come back."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.services.runtime import health

LOOK_S = 1.0
HELD_S = 30.0
"""After so much more a process whose threads cannot run, since one never lets the others (Python's GIL), is ended all
the same, by a timer that needs none."""
EXIT_HUNG = 1


@contextmanager
def ended_if_hung(name: str, limit_s: float, key: str = "") -> Iterator[None]:
    """Inside, the process called ``name`` ends where `health.beat` was not called for ``limit_s`` seconds in which the
    process ran; where each of its threads was is in its log then. ``key``: the config's of ``limit_s``. What it held is
    given to others, and whoever watches over it starts it again."""
    over = threading.Event()
    threading.Thread(target=_watch, args=(name, limit_s, key, over), name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        faulthandler.cancel_dump_traceback_later()


def _watch(name: str, limit_s: float, key: str, over: threading.Event) -> None:
    turns, still_s, look_s = health.turns(), 0.0, min(LOOK_S, limit_s / 4)
    while True:
        asked = time.monotonic()
        faulthandler.dump_traceback_later(limit_s + HELD_S, exit=True)
        if over.wait(look_s):
            return
        if health.turns() != turns:
            turns, still_s = health.turns(), 0.0
            continue
        still_s += min(time.monotonic() - asked, 2 * look_s)  # in the time in which it was stopped it did not hang
        if still_s > limit_s:
            faulthandler.dump_traceback(all_threads=True)
            said = f"{name}: its main loop hung for {still_s:.0f} s{f' ({key})' if key else ''}; its log says where"
            sys.stderr.write(f"{said}\n")
            sys.stderr.flush()
            os._exit(EXIT_HUNG)
