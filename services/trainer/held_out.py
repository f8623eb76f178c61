"""The loss on rows that are held out: how unlikely the policy finds the answers that they bring; of pairs, where the
run trains on such, DPO's, beside the model that the run began with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import structlog
import torch

from penstock.protocols import wire
from penstock.protocols.experience import Trajectory
from penstock.protocols.messages import HeldOutRow
from penstock.services.modeling.parallel.fsdp import forward
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.files import write_whole
from penstock.services.trainer.algorithms.advantages.online_dpo import agreement, pair_loss
from penstock.services.trainer.learner import Learner
from penstock.services.turns.given import given_trajectory
from penstock.services.turns.tokenizer import Tokenizer

log = structlog.get_logger()

START = "held-out-start.npz"
"""In a run's folder: how far apart log π of each held-out pair's answers was when it began."""


@dataclass(frozen=True)
class PairSettings:
    """The loss of a pair, as `online_dpo` has it."""

    beta: float
    shape: Literal["sigmoid", "ipo"]
    start: Path
    """`START`."""


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
    pairs: PairSettings | None = None
    """Of rows that bring a rejected answer too; None: that is not looked at."""


def pack_rows(rows: Iterable[HeldOutRow]) -> bytes:
    """For `unpack_rows`, on every rank."""
    return wire.pack([row.model_dump() for row in rows])


def unpack_rows(packed: bytes) -> list[HeldOutRow]:
    """What `pack_rows` has packed."""
    return [HeldOutRow.model_validate(row) for row in wire.unpack(packed)]


class Measured(NamedTuple):
    """What was found, by the names of sets."""

    losses: dict[str, float]
    """Of answers the mean of −log π over their tokens, in nats, at temperature 1; of pairs the mean of their loss."""
    pairs: dict[str, dict[str, float]]
    """`agreement` on the pairs of those that have some."""


@dataclass
class _Set:
    answers: list[Trajectory] = field(default_factory=list)
    rejected: list[Trajectory] = field(default_factory=list)
    """What each of these is preferred to; empty: there are no pairs."""


class HeldOut:
    """Rows with answers of their own, and the loss on them."""

    def __init__(self, settings: HeldOutSettings, rows: Iterable[HeldOutRow], text: Tokenizer, steps: int) -> None:
        """``steps``: that the run has. Raises `SetupError` where of a set no row can be made tokens of."""
        self._settings, self._steps, rows = settings, steps, list(rows)
        self._sets = {name: _Set() for name in settings.sets}
        paired = {each.set for each in rows if settings.pairs and each.prompt.rejected is not None}
        why: dict[str, str] = {}
        for each in rows:
            both = (False, True) if each.set in paired else (False,)
            try:
                made = [
                    given_trajectory(text, each.prompt, settings.turns, 0, settings.longest, rejected=rejected)
                    for rejected in both
                ]
            except Exception as error:  # a template may raise anything: it costs this row
                why[each.set] = f"row {each.prompt.index}: {error}"
                log.warning("a held-out row has no part in the loss", set=each.set, error=why[each.set])
                continue
            self._sets[each.set].answers.append(made[0])
            self._sets[each.set].rejected += made[1:]
        for name, found in self._sets.items():
            if not found.answers:
                raise SetupError(f"prompts.eval_given.{name}: no row can be used; {why.get(name, 'it has none')}")

    def due(self, version: int) -> bool:
        """The loss is measured once ``version`` is made; 0 is the model as it was."""
        if not version and self._steps:
            return self._settings.before or any(each.rejected for each in self._sets.values())
        return version == self._steps or bool(self._settings.every and version % self._settings.every == 0)

    def measure(self, learner: Learner) -> Measured:
        """What the policy, as it is, makes of them. On several ranks all must ask, and the first one's counts."""
        every = [row for each in self._sets.values() for row in (*each.answers, *each.rejected)]
        found = iter(learner.evaluated(every, np.arange(len(every)), lambda rows: forward(learner.model, rows, 1.0)))
        measured, apart = Measured({}, {}), dict[str, np.ndarray]()
        for name, each in self._sets.items():
            answers, rejected = (_said(rows, [next(found) for _ in rows]) for rows in (each.answers, each.rejected))
            if rejected:
                apart[name] = _sums(answers) - _sums(rejected)
            else:
                measured.losses[name] = -float(np.concatenate(answers).mean())
        if apart and not learner.world.rank:
            self._compare(learner.version, apart, measured)
        return measured

    def _compare(self, version: int, apart: Mapping[str, np.ndarray], measured: Measured) -> None:
        """Adds to ``measured`` what is found of pairs: how far log π of the answers of each are ``apart``, float64
        ``[pairs]``, beside how far they were."""
        pairs = self._settings.pairs
        assert pairs
        if not version:
            _keep(apart, pairs.start)
        start = _kept(pairs.start)
        for name, now in apart.items():
            before = start.get(name)
            if before is None or before.shape != now.shape:
                log.warning("held-out pairs are not measured: it is not known how they began", set=name, at=version)
                continue
            by = torch.from_numpy(now - before)
            measured.losses[name] = float(pair_loss(by, pairs.beta, pairs.shape).mean())
            measured.pairs[name] = agreement(by)


def _said(rows: Sequence[Trajectory], log_probs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Log-probabilities of the tokens of each row's answer, float64."""
    return [found[row.loss_mask == 1].astype(np.float64) for row, found in zip(rows, log_probs, strict=True)]


def _sums(said: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([each.sum() for each in said])


def _keep(apart: Mapping[str, np.ndarray], path: Path) -> None:
    np.savez(file := BytesIO(), allow_pickle=False, **{f"set {name}": values for name, values in apart.items()})
    write_whole(path, file.getvalue(), durable=True)


def _kept(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        return {}
    with np.load(path, allow_pickle=False) as found:
        return {name.removeprefix("set "): found[name] for name in found.files}
