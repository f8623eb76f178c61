"""The held-out prompts of a run: one set or several, one after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from penstock.protocols.experience import Prompt
from penstock.services.data import open_source
from penstock.services.data.config import DataConfig


class HeldOut:
    """The first ``size`` prompts of every set. Draw ``k`` counts through all of them.

    >>> sets = HeldOut({"easy": [Prompt(index=0, text="1+1=")], "hard": [Prompt(index=0, text="17*3=")]}, size=256)
    >>> len(sets), sets.name_of(1), sets.draw(1).text
    (2, 'hard', '17*3=')
    """

    def __init__(self, sets: Mapping[str, Sequence[Prompt]], size: int) -> None:
        self._names, self._sets = list(sets), list(sets.values())
        self._ends = list(accumulate(min(size, len(prompts)) for prompts in self._sets))

    @classmethod
    def open(cls, sets: Mapping[str, DataConfig], size: int, key: str = "prompts.eval") -> HeldOut:
        """Those that stand at ``key`` of a config; ``size`` 0: none, and nothing is opened."""
        opened = {
            name: open_source(config, held_out=True, key=f"{key}.{name}") for name, config in sets.items() if size
        }
        return cls(opened, size)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def draw(self, k: int) -> Prompt:
        """Prompt ``k`` of all."""
        which = self._which(k)
        return self._sets[which][self.place_of(k)]

    def name_of(self, k: int) -> str:
        """The set that prompt ``k`` is from."""
        return self._names[self._which(k)]

    def place_of(self, k: int) -> int:
        """Which of its set's prompts ``k`` is, counted from 0."""
        which = self._which(k)
        return k - (self._ends[which - 1] if which else 0)

    def _which(self, k: int) -> int:
        return bisect_right(self._ends, k)
