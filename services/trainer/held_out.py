"""The loss on rows that are held out: how unlikely the policy finds the answers that they bring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import structlog

from penstock.protocols import wire
from penstock.protocols.experience import Trajectory
from penstock.protocols.messages import HeldOutRow
from penstock.services.modeling.parallel.fsdp import forward
from penstock.services.runtime.errors import SetupError
from penstock.services.trainer.learner import Learner
from penstock.services.turns.given import given_trajectory
from penstock.services.turns.tokenizer import Tokenizer

log = structlog.get_logger()


@dataclass(frozen=True)
class HeldOutSettings:
    """When the loss is measured, and of what."""

    sets: tuple[str, ...] = ()
    """None: nothing is."""
    every: int = 0
    """Steps; 0: before the first and after the last step alone."""
    before: bool = True
    """Before the first step too."""
    turns: Literal["all", "last"] = "all"
    """Which of the assistant's messages count."""
    longest: int | None = None
    """Tokens of a prompt and its answer; None: there is no bound."""


def pack_rows(rows: Iterable[HeldOutRow]) -> bytes:
    """For `unpack_rows`, on every rank."""
    return wire.pack([row.model_dump() for row in rows])


def unpack_rows(packed: bytes) -> list[HeldOutRow]:
    """What `pack_rows` has packed."""
    return [HeldOutRow.model_validate(row) for row in wire.unpack(packed)]


class HeldOut:
    """Rows with answers of their own, and the loss on them."""

    def __init__(self, settings: HeldOutSettings, rows: Iterable[HeldOutRow], text: Tokenizer, steps: int) -> None:
        """``steps``: that the run has. Raises `SetupError` where of a set no row can be made tokens of."""
        self._settings, self._steps = settings, steps
        self._sets: dict[str, list[Trajectory]] = {name: [] for name in settings.sets}
        why: dict[str, str] = {}
        for each in rows:
            try:
                row = given_trajectory(text, each.prompt, settings.turns, 0, settings.longest)
                self._sets[each.set].append(row)
            except Exception as error:  # a template may raise anything: it costs this row
                why[each.set] = f"row {each.prompt.index}: {error}"
                log.warning("a held-out row has no part in the loss", set=each.set, error=why[each.set])
        for name, found in self._sets.items():
            if not found:
                raise SetupError(f"prompts.eval_given.{name}: no row can be used; {why.get(name, 'it has none')}")

    def due(self, version: int) -> bool:
        """The loss is measured once ``version`` is made; 0 is the model as it was."""
        if not version and self._steps:
            return self._settings.before
        return version == self._steps or bool(self._settings.every and version % self._settings.every == 0)

    def measure(self, learner: Learner) -> dict[str, float]:
        """Of each set the mean of −log π (nats) over the tokens of its answers, at temperature 1. On several ranks all
        must ask."""
        every = [row for rows in self._sets.values() for row in rows]
        found = iter(learner.evaluated(every, np.arange(len(every)), lambda rows: forward(learner.model, rows, 1.0)))
        return {name: _mean(rows, [next(found) for _ in rows]) for name, rows in self._sets.items()}


def _mean(rows: Sequence[Trajectory], log_probs: Sequence[np.ndarray]) -> float:
    said = [found[row.loss_mask == 1] for row, found in zip(rows, log_probs, strict=True)]
    return -float(np.concatenate(said).astype(np.float64).mean())
