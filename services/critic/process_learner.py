"""PRIME's process reward model: Cui et al. 2025, arXiv:2502.01456, by Yuan et al. 2024, arXiv:2412.01981."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from penstock.protocols.columns import PROCESS, REFERENCE
from penstock.services.critic.config import CriticConfig
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.model_learner import ModelLearner, mean_metrics, mini_batches
from penstock.services.modeling.packing import Rows
from penstock.services.modeling.parallel.fsdp import forward, sum_gradients
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.pinned import to_device
from penstock.services.runtime import health


class ProcessLearner(ModelLearner):
    """A `ModelLearner` whose language model φ is taught by outcomes alone which answers are right, and so says of each
    token y_t what it was worth (arXiv:2502.01456, eq. 2), with the log-probabilities of the reference:

        r(y_t) = β (log π_φ(y_t | y_<t) − log π_ref(y_t | y_<t))

    ``temperature`` is that of the reference's column.
    """

    SECTION = "critic"
    PUBLISHES = False
    COLUMN = PROCESS
    """What it says of a step."""

    def __init__(
        self, model: Any, config: CriticConfig, steps: int, temperature: float, world: World | None = None
    ) -> None:
        super().__init__(model, config, steps, world)
        self._config, self._temperature = config, temperature

    def values(self, step: TrainingBatch) -> list[np.ndarray]:
        """float32 ``[tokens]`` of each trajectory: r of each token, 0 where nothing was sampled."""
        found = self.evaluate(step, lambda rows: forward(self.model, rows, self._temperature))
        return [
            np.where(trajectory.loss_mask == 1, self._config.beta * (mine - reference), 0).astype(np.float32)
            for trajectory, mine, reference in zip(step.trajectories, found, step.token_values[REFERENCE], strict=True)
        ]

    def train(self, step: TrainingBatch) -> dict[str, float]:
        """The updates of ``step``, whose column ``process`` holds what this model said of it; the model then is
        `version` + 1. Trajectories without a reward have no part in it. Returns the step's metrics, means over the
        updates."""
        updates = []
        for rows in mini_batches(step, self._config.epochs, self._config.mini_batches):
            rate, chosen = self.begin_update(), rows[step.rewarded[rows]]
            loss = self.micro_batches.fitting(
                "forward or backward pass", partial(self._accumulate, step, chosen), self.give_up_update
            )
            ended = self.end_update(loss)
            metrics = {"critic_grad_norm": ended["grad_norm"], "critic_skipped": ended["skipped"]}
            updates.append(metrics | {"critic_loss": loss, "critic_lr": rate})
        self.version += 1
        return mean_metrics(updates) | self._described(step)

    def _accumulate(self, step: TrainingBatch, chosen: np.ndarray) -> float:
        """Adds the gradient of the cross entropy of σ(r(y)) and whether y is right (eq. 4), r(y) being the sum over
        its tokens, in the mean over the ``chosen`` trajectories, of which branches of one session count as one.
        Returns it."""
        if not chosen.size:
            return 0.0
        trajectories = [step.trajectories[i] for i in chosen]
        reference = [step.token_values[REFERENCE][i] for i in chosen]
        _, member, branches = np.unique(step.sessions[chosen], return_inverse=True, return_counts=True)
        told = np.stack([self._right(step, chosen), 1 / branches[member] / len(branches)]).astype(np.float32)
        right, weights = to_device(torch.from_numpy(told), self.device)
        plan, total = self.plan(trajectories, step.groups[chosen]), torch.zeros((), device=self.device)

        def passes() -> Iterator[tuple[Rows, torch.Tensor]]:
            for each, _ in plan:
                health.beat()
                rows = each.rows()
                with self.keeping():
                    said = forward(self.model, rows, self._temperature)
                yield rows, said

        for turn, ((_, counts_once), (rows, said)) in enumerate(zip(plan, self.early(passes()), strict=True), 1):
            worth = self._config.beta * ((said - rows.column(reference)) * rows.mask).sum(-1)
            index = to_device(torch.tensor(rows.index), self.device)
            loss = binary_cross_entropy_with_logits(worth, right[index], weights[index], reduction="sum") * counts_once
            sum_gradients(self.model, not self.sums_once, turn == len(plan))
            loss.backward()
            total += loss.detach()
        return self.world.sum([float(total)])[0]

    def _described(self, step: TrainingBatch) -> dict[str, float]:
        """How much it knew of the step before it learned from it: of what share of the answers it said rightly whether
        they are right."""
        rewarded = np.flatnonzero(step.rewarded)
        if not rewarded.size:
            return {}
        said = np.array([step.token_values[PROCESS][i].sum() for i in rewarded]) > 0
        return {"critic_accuracy": float((said == self._right(step, rewarded)).mean())}

    def _right(self, step: TrainingBatch, rows: np.ndarray) -> np.ndarray:
        """bool ``[rows]``."""
        found: np.ndarray = step.rewards[rows] >= self._config.right
        return found
