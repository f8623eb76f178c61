"""The sort task: ``sort hgbaf=`` is answered by ``abfgh``."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import overload

import numpy as np

from penstock.protocols.experience import Prompt
from penstock.services.data.config import SortData

LETTERS = "abcdefghij"
HELD_OUT = 16
"""One in so many letter strings is never trained on."""


class SortSource(Sequence[Prompt]):
    """Random distinct letters of `LETTERS`, the same for the same index and seed on every machine."""

    def __init__(self, config: SortData, held_out: bool) -> None:
        self._config, self._held_out = config, held_out

    def __len__(self) -> int:
        return self._config.size

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        random = np.random.default_rng([self._config.seed, index, self._held_out])
        while True:
            size = int(random.integers(self._config.min_letters, self._config.max_letters + 1))
            letters = "".join(random.choice(list(LETTERS), size, replace=False))
            if (zlib.crc32(letters.encode()) % HELD_OUT == 0) == self._held_out:
                return Prompt(index=index, text=f"sort {letters}=", truth="".join(sorted(letters)))
