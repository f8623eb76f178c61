"""Scorers that compute, in virtual time: one group after the other each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from penstock.pipeline.simulate.clock import Clock, Event


class Scorer:
    """So many actors of a kind that compute a column. ``works`` is told the number of one that begins (True) or ends a
    group."""

    def __init__(
        self, clock: Clock, count: int, works: Callable[[int, bool], None] = lambda actor, begins: None
    ) -> None:
        self._clock, self.count, self._works = clock, count, works
        self.busy_s = 0.0
        self._free = deque(range(count))
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self._running: dict[int, tuple[Event, Callable[[], None]]] = {}
        self._asleep = False

    def score(self, seconds: float, then: Callable[[], None]) -> None:
        """``then`` is called when a group that takes so long is scored."""
        self._queue.append((seconds, then))
        self._go_on()

    def sleep(self, asleep: bool) -> None:
        """All of them stand still, or go on."""
        if asleep == self._asleep:
            return
        self._asleep = asleep
        for actor, (event, then) in [*self._running.items()]:
            if asleep:
                self._clock.call_off(event)
                self._clock.ends()
                self._running[actor] = [event[0] - self._clock.worked], then
            else:
                self._work(actor, event[0], then)
        self._go_on()

    def _go_on(self) -> None:
        while self._free and self._queue and not self._asleep:
            seconds, then = self._queue.popleft()
            actor = self._free.popleft()
            self.busy_s += seconds
            self._works(actor, True)
            self._work(actor, seconds, then)

    def _work(self, actor: int, seconds: float, then: Callable[[], None]) -> None:
        self._clock.begins()
        self._running[actor] = self._clock.after_work(seconds, partial(self._done, actor, then)), then

    def _done(self, actor: int, then: Callable[[], None]) -> None:
        del self._running[actor]
        self._free.append(actor)
        self._works(actor, False)
        self._clock.ends()
        self._go_on()
        then()
