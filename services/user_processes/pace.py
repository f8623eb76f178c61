"""When calls of one program may begin."""

from __future__ import annotations

import threading
import time

BURST_S = 1.0
"""Calls that have not begun for so long may begin at once."""


class Pace:
    """At most so many calls ``per_minute`` begin, over all who share it; None: as many as they like. None begins while
    it is ``held``."""

    def __init__(self, per_minute: float | None) -> None:
        self._each_s = 60 / per_minute if per_minute else 0.0
        self._lock = threading.Lock()
        self.held = False
        self.beginning = threading.Lock()
        """Held by who begins a call, until that is under way."""
        self._next = 0.0
        """When the next call would begin, if none had ever been late."""

    def wait_s(self) -> float:
        """Seconds until a call may begin."""
        return max(0.0, self._next - time.monotonic()) if self._each_s else 0.0

    def begin(self) -> bool:
        """A call begins, if one may."""
        if self.held:
            return False
        if not self._each_s:
            return True
        with self._lock:
            if self.wait_s():
                return False
            unused = max(0.0, BURST_S - self._each_s)
            self._next = max(self._next, time.monotonic() - unused) + self._each_s
            return True
