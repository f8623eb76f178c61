"""A rollout's engine in virtual time: sequences that are decoded together, the more the slower."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from penstock.pipeline.simulate.clock import Clock, Event
from penstock.pipeline.simulate.costs import Costs


@dataclass
class Finished:
    """A group, when its last sequence has ended."""

    number: int
    tokens: int = 0
    """That were sampled; and those of answers that were given."""
    given: int = 0
    oldest: int = 1 << 62
    """Version that sampled its oldest tokens."""
    versions: float = 0.0
    """Summed over the tokens."""
    left: int = field(default=0, repr=False)
    read: bool = field(default=False, repr=False)
    """Its prompt was prefilled."""

    @property
    def learned(self) -> int:
        """Tokens that it is scored and trained for."""
        return self.tokens + self.given


class VirtualEngine:
    """Decodes up to ``slots`` sequences, of which those of a group begin ``together`` or each when there is room; says
    which groups are ``finished``. What is under way goes on under the next version, as in the real ones."""

    def __init__(
        self, clock: Clock, costs: Costs, slots: int, together: bool, finished: Callable[[Finished], None]
    ) -> None:
        self._clock, self._costs, self._slots, self._finished = clock, costs, slots, finished
        self._together = together
        self._queue: deque[tuple[Finished, list[int]]] = deque()
        self._running: list[tuple[float, int, float, Finished]] = []
        """A heap: by the place, counted in tokens since the start, at which each ends; a number; and began."""
        self._place, self._worked, self._debt = 0.0, 0.0, 0.0
        self._at: list[float] = [0.0]
        self._versions: list[int] = [-1]
        self._paused = self._busy = self._asleep = False
        self._held = 0
        self._next: Event | None = None
        self._count = 0
        self.busy_s = 0.0
        """Work that it has done."""

    @property
    def version(self) -> int:
        """That it serves."""
        return self._versions[-1]

    def add(self, number: int, lengths: list[int], given: int = 0) -> None:
        """A group to generate, with the lengths that its sequences will have, and so many tokens of given ones."""
        self._move()
        group = Finished(number, given=given, left=len(lengths))
        self._queue += [(group, lengths)] if self._together else [(group, [length]) for length in lengths]
        self._go_on()

    def swap(self, version: int) -> None:
        """Stands still, and goes on under ``version``."""
        self._move()
        self._at.append(self._place)
        self._versions.append(version)
        self._paused = True
        self._clock.after(self._costs.pause_s, self._resume)
        self._go_on()

    def sleep(self, asleep: bool) -> None:
        """It stands still, or goes on."""
        if asleep != self._asleep:
            self._move()
            self._asleep = asleep
            self._go_on()

    def hold(self, begins: bool) -> None:
        """Somebody else begins to compute on its device in its place, or has ended."""
        self._move()
        self._held += 1 if begins else -1
        self._go_on()

    def die(self) -> None:
        """All that was under way is gone."""
        self._move()
        self._queue.clear()
        self._running.clear()
        self._at.append(self._place)
        self._versions.append(-1)
        self._debt = 0.0
        self._go_on()

    def _resume(self) -> None:
        self._move()
        self._paused = False
        self._go_on()

    def _step_s(self) -> float:
        costs, count = self._costs, len(self._running)
        return max(costs.decode_s + costs.decode_sequence_s * count, costs.decode_compute_s * count)

    def _move(self) -> None:
        """To where the clock is."""
        worked = self._clock.worked - self._worked
        self._worked = self._clock.worked
        if not self._busy:
            return
        self.busy_s += worked
        paid = min(worked, self._debt)
        self._debt -= paid
        self._place += (worked - paid) / self._step_s()

    def _go_on(self) -> None:
        """Takes in what there is room for, and says when the next sequence ends."""
        while self._queue and len(self._running) + len(self._queue[0][1]) <= max(self._slots, len(self._queue[0][1])):
            group, lengths = self._queue.popleft()
            if not group.read:
                group.read = True
                self._debt += self._costs.prompt * self._costs.prefill_token_s
            for length in lengths:
                self._count += 1
                heappush(self._running, (self._place + length, self._count, self._place, group))
        busy = bool(self._running) and not (self._paused or self._asleep or self._held)
        if busy != self._busy:
            (self._clock.begins if busy else self._clock.ends)()
            self._busy = busy
        self._clock.call_off(self._next)
        self._next = None
        if busy:
            left = self._debt + max(0.0, self._running[0][0] - self._place) * self._step_s()
            self._next = self._clock.after_work(left, self._end_one)

    def _end_one(self) -> None:
        self._move()
        end, _, began, group = heappop(self._running)
        self._place = max(self._place, end)
        self._count_versions(began, end, group)
        group.left -= 1
        self._go_on()
        if not group.left:
            self._finished(group)

    def _count_versions(self, began: float, end: float, group: Finished) -> None:
        first = bisect_right(self._at, began) - 1
        group.oldest = min(group.oldest, self._versions[first])
        group.tokens += round(end - began)
        until = [*self._at[first + 1 :], end]
        for index, (start, stop) in enumerate(zip([began, *until], until, strict=False), first):
            group.versions += max(0.0, min(stop, end) - start) * self._versions[index]
            if stop >= end:
                break
