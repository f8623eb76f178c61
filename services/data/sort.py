"""The sort task: ``sort hgbaf=`` is answered by ``abfgh``."""

from __future__ import annotations

import zlib

import numpy as np

from penstock.protocols.experience import Prompt
from penstock.services.data.config import SortData
from penstock.services.data.source import PromptSource

LETTERS = "abcdefghij"
HELD_OUT = 16
"""One in so many letter strings is never trained on."""


class SortSource(PromptSource):
    """Random distinct letters of `LETTERS`, the same for the same index and seed on every machine."""

    def __init__(self, config: SortData, held_out: bool) -> None:
        self._config, self._held_out = config, held_out

    def __len__(self) -> int:
        return self._config.size

    def prompt(self, index: int) -> Prompt:
        """See `PromptSource`."""
        random = np.random.default_rng([self._config.seed, index, self._held_out])
        while True:
            size = int(random.integers(self._config.min_letters, self._config.max_letters + 1))
            letters = "".join(random.choice(list(LETTERS), size, replace=False))
            if (zlib.crc32(letters.encode()) % HELD_OUT == 0) == self._held_out:
                return Prompt(index=index, text=f"sort {letters}=", truth="".join(sorted(letters)))
