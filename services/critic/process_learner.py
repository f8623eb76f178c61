"""PRIME's process reward model: Cui et al. 2025, arXiv:2502.01456; that it is one: Yuan et al. 2024, 2412.01981."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from penstock.protocols.columns import PROCESS, REFERENCE
from penstock.services.critic.config import CriticConfig
from penstock.services.critic.step_learner import StepLearner
from penstock.services.learning.batch import TrainingBatch
from penstock.services.modeling.parallel.fsdp import forward
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.pinned import to_device


class ProcessLearner(StepLearner):
    """A `StepLearner` whose language model φ is taught by outcomes alone which answers are right, and so says of each
    token y_t what it was worth (arXiv:2502.01456, eq. 2), with the log-probabilities of the reference:

        r(y_t) = β (log π_φ(y_t | y_<t) − log π_ref(y_t | y_<t))

    ``temperature`` is that of the reference's column.
    """

    COLUMN = PROCESS

    def __init__(
        self, model: Any, config: CriticConfig, steps: int, temperature: float, world: World | None = None
    ) -> None:
        super().__init__(model, config, steps, world)
        self._temperature = temperature

    def values(self, step: TrainingBatch) -> list[np.ndarray]:
        """float32 ``[tokens]`` of each trajectory: r of each token, 0 where nothing was sampled."""
        found = self.evaluate(step, lambda rows: forward(self.model, rows, self._temperature))
        return [
            np.where(trajectory.loss_mask == 1, self._config.beta * (mine - reference), 0).astype(np.float32)
            for trajectory, mine, reference in zip(step.trajectories, found, step.token_values[REFERENCE], strict=True)
        ]

    def train(self, step: TrainingBatch) -> dict[str, float]:
        """See `StepLearner.train`."""
        return self._updates(step, lambda chosen: (self._accumulate(step, chosen), {})) | self._described(step)

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
        passes = self._forward(plan, lambda rows: forward(self.model, rows, self._temperature))
        for turn, (counts_once, rows, said) in enumerate(passes, 1):
            worth = self._config.beta * ((said - rows.column(reference)) * rows.mask).sum(-1)
            index = to_device(torch.tensor(rows.index), self.device)
            loss = binary_cross_entropy_with_logits(worth, right[index], weights[index], reduction="sum") * counts_once
            self.sum_gradients(turn == len(plan))
            (loss * self.loss_scale.value).backward()
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
