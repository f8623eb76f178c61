"""Virtual time, in which nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

Event = list[Any]
"""When, a number that breaks ties, and what to do; None once it is called off."""


class Clock:
    """Calls what is due, in its order. Work goes by a clock of its own, which slows down where more actors compute than
    there are ``cores`` (None: each has its own)."""

    def __init__(self, cores: float | None) -> None:
        self.now = 0.0
        """Seconds since the start."""
        self.worked = 0.0
        """Seconds of work that whoever was busy all the time has done."""
        self._cores, self._busy = cores, 0
        self._waits: list[Event] = []
        self._work: list[Event] = []
        self._numbers = count()

    def after(self, seconds: float, then: Callable[[], None]) -> Event:
        """``then`` is called ``seconds`` from now."""
        event: Event = [self.now + seconds, next(self._numbers), then]
        heappush(self._waits, event)
        return event

    def after_work(self, seconds: float, then: Callable[[], None]) -> Event:
        """``then`` is called after so much work."""
        event: Event = [self.worked + seconds, next(self._numbers), then]
        heappush(self._work, event)
        return event

    def call_off(self, event: Event | None) -> None:
        """It is not called."""
        if event:
            event[2] = None

    def begins(self) -> None:
        """One more actor computes."""
        self._busy += 1

    def ends(self) -> None:
        """One less does."""
        self._busy -= 1

    def step(self) -> bool:
        """Calls what is due next; False where there is nothing."""
        speed = 1.0 if self._cores is None else min(1.0, self._cores / max(1, self._busy))
        for events in (self._waits, self._work):
            while events and events[0][2] is None:
                heappop(events)
        waits = self._waits[0][0] if self._waits else float("inf")
        work = self.now + (self._work[0][0] - self.worked) / speed if self._work else float("inf")
        if min(waits, work) == float("inf"):
            return False
        due = self._waits if waits <= work else self._work
        self.worked += (min(waits, work) - self.now) * speed
        self.now = min(waits, work)
        if due is self._work:
            self.worked = due[0][0]  # what rounding would leave is no work
        heappop(due)[2]()
        return True
