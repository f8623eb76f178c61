"""How long a run's steps take, and so how long it has yet to go."""

from __future__ import annotations

from collections import deque
from datetime import timedelta

LATEST = 20
"""Steps whose mean is taken."""


class Pace:
    """Of the last `LATEST` steps that it was told, by the run's own time: whoever looks on may have come late. Of one
    step alone, the mean since training began."""

    def __init__(self) -> None:
        self._ends: deque[tuple[int, float]] = deque(maxlen=LATEST + 1)
        """Steps done, and seconds of training by then."""

    def tell(self, done: int, train_s: float) -> None:
        """So many steps are ``done``, after so many seconds since training began; the same again is nothing new."""
        if self._ends and done < self._ends[-1][0]:  # steps are done again
            self._ends.clear()
        if done > (self._ends[-1][0] if self._ends else 0):
            self._ends.append((done, train_s))

    def left(self, steps: int) -> str:
        """Until so many ``steps`` are done, e.g. ``1:02:03``; dashes while nobody knows."""
        if not self._ends:
            return "-:--:--"
        first, last = self._ends[0] if len(self._ends) > 1 else (0, 0.0), self._ends[-1]
        return clock((steps - last[0]) * (last[1] - first[1]) / (last[0] - first[0]))


def clock(seconds: float) -> str:
    """``3723.4`` as ``1:02:03``."""
    return str(timedelta(seconds=max(0, round(seconds))))
