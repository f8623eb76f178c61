"""Several sources as one, in shares that the config says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from penstock.protocols.experience import Prompt
from penstock.services.data import DataError
from penstock.services.data.source import PromptSource

LONGEST = 50_000_000
"""Rows of a mixture: more would be kept in memory as numbers alone."""


class Mixture(PromptSource):
    """Rows of all ``sources``, so spread that any stretch of the mixture has them in their shares; a run that shuffles
    draws them in these shares on average. It is as long as it must be for every row of each to be there once; where a
    source's share is larger than its part of all rows, its rows come again. ``weights``: shares of the sources, of any
    sum; none: each row is there once. ``named``: sources whose rows say themselves of which they are. Raises
    `DataError`.

    >>> easy = [Prompt(index=i, text=f"{i}+1=") for i in range(2)]
    >>> hard = [Prompt(index=i, text=f"{i}*7=") for i in range(2)]
    >>> [prompt.source for prompt in Mixture({"easy": easy, "hard": hard}, {"easy": 1, "hard": 2}, "prompts.train")]
    ['hard', 'easy', 'hard', 'hard', 'easy', 'hard']
    """

    def __init__(
        self, sources: Mapping[str, Sequence[Prompt]], weights: Mapping[str, float], key: str,
        named: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._names, self._sources, self._named = list(sources), list(sources.values()), set(named)
        for name, source in sources.items():
            if not len(source):
                raise DataError(f"{key}.sources.{name}: the data source has no rows")
        sizes = np.array([len(source) for source in self._sources], np.float64)
        shares = np.array([weights[name] for name in self._names]) if weights else sizes
        shares = shares / shares.sum()
        counts = np.maximum(np.ceil(shares * (sizes / shares).max() - 1e-6), sizes).astype(np.int64)
        if counts.sum() > LONGEST:
            rare = self._names[int(np.argmax(sizes / shares))]
            raise DataError(
                f"{key}.weights: for every row of {rare!r} to come once the mixture would have {counts.sum():,} rows; "
                f"give {rare!r} a larger weight, or a `limit`"
            )
        places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        order = np.argsort(places, kind="stable")
        self._which = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[order]
        rows = np.concatenate([np.arange(count) % len(each) for count, each in zip(counts, self._sources, strict=True)])
        self._rows = rows[order].astype(np.int32)

    def __len__(self) -> int:
        return len(self._which)

    def prompt(self, index: int) -> Prompt:
        """See `PromptSource`."""
        which = int(self._which[index])
        found = self._sources[which][int(self._rows[index])]
        name = self._names[which]
        return found if name in self._named and found.source else found.model_copy(update={"source": name})

    @property
    def sources(self) -> dict[str, Sequence[Prompt]]:
        """Its parts, by name."""
        return dict(zip(self._names, self._sources, strict=True))

    def is_of(self, name: str, prompt: Prompt) -> bool:
        """``prompt``, one of the mixture's, is from its source ``name``."""
        if name not in self._named:
            return prompt.source == name
        part = self.sources[name]
        try:
            return prompt.index < len(part) and part[prompt.index] == prompt
        except DataError:  # a row that is none: ``prompt`` is another
            return False

    def one_of_each(self) -> list[int]:
        """The first prompt of each source."""
        return [int(np.argmax(self._which == which)) for which in range(len(self._names))]
