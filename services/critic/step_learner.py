"""What the models of critics have in common: the column that they write of a step, and how they go over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from penstock.services.critic.config import CriticConfig
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.model_learner import ModelLearner, mean_metrics, mini_batches
from penstock.services.modeling.packing import Pass, Rows
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime import health


class StepLearner(ModelLearner):
    """A `ModelLearner` that says something of a step before it learns from it."""

    SECTION = "critic"
    PUBLISHES = False
    COLUMN: ClassVar[str]
    """What it says of a step."""

    def __init__(self, model: Any, config: CriticConfig, steps: int, world: World | None) -> None:
        super().__init__(model, config, steps, world)
        self._config = config

    def values(self, step: TrainingBatch) -> list[np.ndarray]:
        """float32 ``[tokens]`` of each trajectory: its column."""
        raise NotImplementedError

    def train(self, step: TrainingBatch) -> dict[str, float]:
        """The updates of ``step``, which has this model's column; the model then is `version` + 1. Trajectories without
        a reward have no part in it. Returns the step's metrics, means over the updates."""
        raise NotImplementedError

    def _updates(
        self, step: TrainingBatch, accumulate: Callable[[np.ndarray], tuple[float, dict[str, float]]]
    ) -> dict[str, float]:
        """``accumulate`` adds the gradient of some rows of the step, all of which have a reward, and gives loss and
        metrics."""
        updates = []
        for rows in mini_batches(step, self._config.epochs, self._config.mini_batches):
            rate = self.begin_update()
            loss, metrics = self.gradient(partial(accumulate, rows[step.rewarded[rows]]))
            ended = self.end_update(loss)
            metrics |= {"critic_grad_norm": ended["grad_norm"], "critic_skipped": ended["skipped"]}
            if "loss_scale" in ended:
                metrics["critic_loss_scale"] = ended["loss_scale"]
            updates.append(metrics | {"critic_loss": loss, "critic_lr": rate})
        self.version += 1
        return mean_metrics(updates)

    def _forward(
        self, plan: Sequence[tuple[Pass, float]], compute: Callable[[Rows], torch.Tensor]
    ) -> Iterator[tuple[float, Rows, torch.Tensor]]:
        """Of each micro-batch of the ``plan`` how often it counts, its rows, and what ``compute`` gives, which a
        backward follows."""

        def passes() -> Iterator[tuple[Rows, torch.Tensor]]:
            for each, _ in plan:
                health.beat()
                rows = each.rows()
                with self.keeping():
                    found = compute(rows)
                yield rows, found

        for (_, counts_once), (rows, found) in zip(plan, self.early(passes()), strict=True):
            yield counts_once, rows, found
