"""The value model: values of a batch, and one optimizer step towards its returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.protocols.columns import VALUES
from penstock.services.critic.config import CriticConfig
from penstock.services.critic.step_learner import StepLearner
from penstock.services.critic.value_loss import value_loss
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.config import Penalties
from penstock.services.learning.constraints import with_known_costs
from penstock.services.learning.token_returns import gae
from penstock.services.learning.token_rewards import token_rewards
from penstock.services.modeling.parallel.fsdp import forward_values
from penstock.services.modeling.parallel.world import World


class CriticLearner(StepLearner):
    """A `StepLearner` whose model gives one number a token; ``gamma`` and ``lam`` are those of the returns that it
    learns, ``penalties`` is what is taken off the rewards."""

    VALUED = True
    COLUMN = VALUES

    def __init__(
        self, model: Any, config: CriticConfig, steps: int, gamma: float, lam: float, penalties: Penalties,
        world: World | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, config, steps, world)
        self._gamma, self._lam, self._penalties = gamma, lam, penalties

    def values(self, step: TrainingBatch) -> list[np.ndarray]:
        """float32 ``[tokens]`` of each trajectory: the value of the state in which each token was chosen, 0 where
        nothing was sampled."""
        return self.evaluate(step, lambda rows: forward_values(self.model, rows))

    def train(self, step: TrainingBatch) -> dict[str, float]:
        """See `StepLearner.train`."""
        step = with_known_costs(step, self._penalties.constraints)
        rewarded = np.flatnonzero(step.rewarded)
        returns = torch.zeros((len(step.trajectories), max((len(t.tokens) for t in step.trajectories), default=0)))
        if rewarded.size:
            state = self.penalties_of_step(self._config.warmup_steps)
            rewards = token_rewards(step, rewarded, self._penalties, state)
            old = step.padded(step.token_values[VALUES], rewarded).double() * rewards.mask
            _, found = gae(rewards.tokens, old, rewards.mask, self._gamma, self._lam)
            returns[rewarded, : found.shape[1]] = found.float()
        return self._updates(step, lambda chosen: self._accumulate(step, chosen, returns))

    def _accumulate(
        self, step: TrainingBatch, chosen: np.ndarray, of_step: torch.Tensor
    ) -> tuple[float, dict[str, float]]:
        mask = step.padded([t.loss_mask for t in step.trajectories], chosen)
        tokens = float(mask.sum())
        if not tokens:
            return 0.0, {}
        returns = of_step[chosen, : mask.shape[1]]
        old = step.padded(step.token_values[VALUES], chosen) * mask
        sums: torch.Tensor | None = None  # loss and clipped tokens, on the device: a number would be waited for
        plan = self.plan([step.trajectories[i] for i in chosen], step.groups[chosen])
        passes = self._forward(plan, lambda rows: forward_values(self.model, rows))
        for turn, (counts_once, rows, values) in enumerate(passes, 1):
            index, width = list(rows.index), values.shape[1]
            wanted, before = (x[index, 1 : width + 1].to(values) for x in (returns, old))
            losses, clipped = value_loss(values, before, wanted, self._config.clip)
            loss = counts_once * (losses * rows.mask).sum() / tokens
            self.sum_gradients(turn == len(plan))
            (loss * self.loss_scale.value).backward()
            mine = torch.stack([loss.detach().double(), counts_once * (clipped & rows.mask).sum().double()])
            sums = mine if sums is None else sums + mine
        total, clipped_tokens = self.world.sum([0.0, 0.0] if sums is None else sums.tolist())
        sampled = mask.bool()
        spread = returns[sampled].var(correction=0)
        unexplained = (returns - old)[sampled].var(correction=0)
        return total, {
            "critic_value_mean": float(old[sampled].mean()),
            "critic_return_mean": float(returns[sampled].mean()),
            "critic_explained_variance": float(1 - unexplained / spread) if spread > 0 else 0.0,
            "critic_clip_fraction": clipped_tokens / tokens,
        }
