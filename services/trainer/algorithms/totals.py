"""What the losses of an update's parts are divided by."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Totals:
    """Counts over an update."""

    tokens: float
    rows: float
    sessions: float | None = None
    """Rows, with the branches of an agent's session as one; None: there are none."""
    good: float = 0.0
    """Tokens of trajectories that are imitated."""
    given: float = 0.0
    """Tokens that were given; all other counts are of what was sampled alone."""
    given_rows: float = 0.0
    """Rows that were."""
    taught: float = 0.0
    """Tokens of which some teacher says what is likely."""

    @classmethod
    def of(
        cls,
        sampled: np.ndarray,
        given: np.ndarray,
        sessions: np.ndarray,
        good: float,
        tops: Collection[Sequence[tuple[np.ndarray, np.ndarray]]],
        teaches_given: bool = False,
    ) -> Totals:
        """Of trajectories, each with so many tokens ``sampled`` and ``given``, int64, and of one of ``sessions``;
        ``tops``: what each teacher says of them (`TrainingBatch.tops`), of given ones too with ``teaches_given``."""
        own, taught = sampled > 0, 0
        for row, logs in enumerate(zip(*([logs for _, logs in teacher] for teacher in tops), strict=True)):
            if own[row] or teaches_given:
                taught += int(np.any([~np.isnan(said[:, -1]) for said in logs], 0).sum())
        counts = (own.sum(), len(np.unique(sessions[own])), good, given.sum(), (given > 0).sum(), taught)
        return cls(float(sampled.sum()), *map(float, counts))

    @property
    def sequences(self) -> float:
        """What a mean over sequences is taken over."""
        return self.rows if self.sessions is None else self.sessions
