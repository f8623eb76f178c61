"""Which prompts rest for some epochs, since their last answers were all too good, or all too bad, to learn from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.services.broker.rules.filtering import side_of
from penstock.services.broker.rules.journal import Journal

TABLE = "curriculum"


@dataclass(frozen=True)
class Bounds:
    """What is too hard and too easy, by the mean reward of a group's answers, and for how many epochs it then rests."""

    low: float
    high: float
    rest_hard: int
    rest_easy: int

    def rest(self, mean: float) -> int:
        """Epochs for which a prompt is left out whose answers had this mean reward."""
        return {"low": self.rest_hard, "high": self.rest_easy, None: 0}[side_of(mean, self.low, self.high)]


class Curriculum:
    """Draws are passed over, never put off: which group has which number, and so the gate, is not touched. ``row_of``
    says which row of the data a draw is, ``size`` how many rows there are. Without ``bounds`` nothing rests."""

    def __init__(self, journal: Journal, bounds: Bounds | None, size: int, row_of: Callable[[int], int]) -> None:
        self._journal, self._bounds, self._size, self._row_of = journal, bounds, size, row_of
        self._until: dict[int, int] = {int(row): self._epoch_of(said) for row, said in journal.rows(TABLE).items()}
        """Row to the last epoch in which it rests."""
        self._epoch = 0
        self._resting = range(0)
        """Draws that are known to rest: not looked at again, as long as nothing that rests is woken."""

    def measured(self, draw: int, mean: float) -> None:
        """The answers to this draw's prompt had this mean reward. May be said again."""
        if self._bounds is None:
            return
        row, rest = self._row_of(draw), self._bounds.rest(mean)
        if rest:
            until = draw // self._size + rest
            if until < self._until.get(row, -1):
                self._resting = range(0)
            self._until[row] = until
            self._journal.put(TABLE, row, {"until": self._until[row], "size": self._size})
        elif self._until.pop(row, None) is not None:
            self._resting = range(0)
            self._journal.delete(TABLE, row)

    def _epoch_of(self, said: Mapping[str, int]) -> int:
        """The last in which a row rests, where epochs were of another ``size`` when that was said: data may grow."""
        then = said.get("size", self._size)
        return ((said["until"] + 1) * then - 1) // self._size

    def next(self, draw: int) -> int:
        """The first draw from ``draw`` on whose prompt does not rest; ``draw`` itself, where all do."""
        if not self._until:
            return draw
        self._epoch = draw // self._size
        end = draw + 2 * self._size  # the whole of the next epoch is among them
        found = draw
        for later in range(self._resting.stop if draw in self._resting else draw, end):
            if self._until.get(self._row_of(later), -1) < later // self._size:
                end = found = later
                break
        self._resting = range(draw, end)
        return found

    def counts(self) -> dict[str, float]:
        """How many prompts rest in the epoch that is drawn from; nothing where none may."""
        if self._bounds is None:
            return {}
        return {"prompts_resting": float(sum(until >= self._epoch for until in self._until.values()))}
