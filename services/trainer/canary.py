"""The sequence that every version is checked with, and how far an engine may be from the trainer on it.

The bound is the table's until a few versions were loaded; from then on it is `FACTOR` times the largest difference that
they had, which is what this model, in this precision, on these engines comes to. So a wrong version is told from a
right one where the table would let both pass. What was seen and what follows from it is in the run's ``canary.json``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from penstock.services.runtime.files import write_whole

log = structlog.get_logger()

TEXT = (
    "The river had risen in the night, and by morning the lower fields were under water. Nobody in the village was "
    "surprised: it happened every few years, usually in spring, and the houses stood well above the bank. What did "
    "surprise them was a small blue boat, tied to the fence of the mill, with 3 baskets of apples in it and a note "
    'that said: "Paid for. Please return the baskets by Thursday, 17:30." The miller read it twice, put on his hat, '
    "and went to ask his neighbour whether she had ordered any apples. She had not, but she knew who had."
)
"""Text as people write it: an engine and a trainer differ on random ids as they never do in a run."""
SEEN = 8
"""Loads that the bound is made of."""
FACTOR = 10.0
FLOOR = 0.01
"""Share of the table's bound that it never falls below."""


def canary_tokens(tokenizer: Any, model_config: Any, length: int) -> list[int]:
    """Ids of `TEXT`, ``length`` of them at most, and no more than the model has positions; of a tokenizer that does not
    know it (a tiny model's), ids drawn once and for all."""
    text = model_config.get_text_config()
    length = min(length, getattr(text, "max_position_embeddings", None) or 1 << 20)
    if length < 2:
        return []
    ids = [int(token) for token in tokenizer.encode(TEXT, add_special_tokens=False)][:length]
    if len(ids) >= length // 2 and len(set(ids)) > len(ids) // 4 and max(ids, default=0) < text.vocab_size:
        return ids
    return np.random.default_rng(0).integers(0, text.vocab_size, length).tolist()


class CanaryBound:
    """The bound of a run, kept in ``path``. ``table`` is where it begins; ``fixed``: the config says it, it stays."""

    def __init__(self, path: Path, dtype: str, table: float, fixed: bool) -> None:
        self._path, self._dtype, self._table, self._fixed = path, dtype, table, fixed
        self._seen: list[float] = []
        if path.is_file() and not fixed:
            told = json.loads(path.read_text())
            if told.get("dtype") == dtype:
                self._seen = [float(value) for value in told["seen"]][:SEEN]

    @property
    def tolerance(self) -> float:
        """Largest mean difference of the canary's log-probabilities."""
        if self._fixed or len(self._seen) < SEEN:
            return self._table
        return float(np.clip(FACTOR * max(self._seen), FLOOR * self._table, self._table))

    def note(self, difference: float) -> None:
        """A version was loaded, with this difference."""
        if self._fixed or len(self._seen) >= SEEN:
            return
        self._seen.append(difference)
        told = {"dtype": self._dtype, "seen": self._seen, "table": self._table, "tolerance": self.tolerance}
        write_whole(self._path, json.dumps(told, indent=1))
        if len(self._seen) == SEEN:
            log.info("the canary is calibrated", largest=max(self._seen), tolerance=self.tolerance, table=self._table)
