"""The losses on held-out rows, by the steps after which they were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping

from penstock.services.broker.rules.journal import Journal


class HeldOutLosses:
    """Each is measured again where its step is done again."""

    TABLE = "losses"

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        rows = sorted(journal.rows(self.TABLE).items(), key=lambda item: int(item[0]))
        self.by_step: dict[int, dict[str, float]] = {int(step): row["sets"] for step, row in rows}
        """Steps done to the loss on each set, nats a token."""
        self.pairs: dict[int, dict[str, dict[str, float]]] = {int(step): row.get("pairs", {}) for step, row in rows}
        """And to what was found of sets of pairs (`EvalLoss`)."""

    def note(self, step: int, sets: Mapping[str, float], pairs: Mapping[str, dict[str, float]]) -> None:
        """After so many steps."""
        self.by_step[step], self.pairs[step] = dict(sets), dict(pairs)
        self._journal.put(self.TABLE, step, {"sets": dict(sets), "pairs": dict(pairs)})

    def course(self, by: str | None = None) -> list[tuple[int, float]]:
        """Step and score, which is the loss with its sign turned: of the set ``by``, or the mean over all. What is no
        number is none."""
        course = []
        for step, sets in sorted(self.by_step.items()):
            values = [loss for name, loss in sets.items() if by in (None, name)]
            if values and math.isfinite(total := sum(values)):
                course.append((step, -total / len(values)))
        return course
