"""The order in which prompts are drawn: a function of the draw's number alone, so nothing of it needs remembering."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.protocols.experience import Prompt
from penstock.services.data import DataError


class PromptStream:
    """Draw ``k`` is a prompt of epoch ``k // len(source)``; each epoch is a permutation seeded by run and epoch."""

    def __init__(self, source: Sequence[Prompt], seed: int, shuffle: bool, epochs: int | None) -> None:
        if not len(source):
            raise DataError("prompts.train: the data source has no rows, so there is nothing to train on")
        self._source, self._seed, self._shuffle = source, seed, shuffle
        self.limit = len(source) * epochs if epochs else None
        """Number of draws there are; None for no end."""
        self._orders: dict[int, np.ndarray] = {}
        """Of the epochs that were asked about last: two, where one ends."""

    def __len__(self) -> int:
        """Draws in an epoch."""
        return len(self._source)

    def draw(self, k: int) -> Prompt:
        """The prompt of draw ``k``."""
        return self._source[self.row(k)]

    def row(self, k: int) -> int:
        """Which row of the source that is."""
        epoch, position = divmod(k, len(self._source))
        if not self._shuffle:
            return position
        if epoch not in self._orders:
            last = list(self._orders.items())[-1:]
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._source))
            self._orders = {**dict(last), epoch: order}
        return int(self._orders[epoch][position])
