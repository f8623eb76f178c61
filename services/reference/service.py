"""The reference scorer: log-probabilities of sampled tokens under a frozen model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.protocols.columns import REFERENCE
from penstock.protocols.experience import Group
from penstock.services.modeling import determinism
from penstock.services.modeling.load import device_of, load_model
from penstock.services.modeling.logprobs import logprobs, shares_prompts
from penstock.services.modeling.packing import by_trajectory, plan_rows
from penstock.services.reference.config import ReferenceConfig
from penstock.services.runtime.actor import ActorContext
from penstock.services.runtime.scorer import Answer, ScorerActor, ScoringTask


class Reference:
    """The frozen model. With ``alone`` it scores each group by itself: a group's numbers may depend on what else is in
    its batch, in the last bit."""

    def __init__(self, config: ReferenceConfig, model_path: str, dtype: str, temperature: float, alone: bool) -> None:
        self._config, self._temperature, self._alone = config, temperature, alone
        self._device = device_of(config.device, "reference.device")
        self._model = load_model(
            config.path or model_path, dtype, self._device, "reference.path" if config.path else "model.path"
        ).eval()

    def room(self, in_hand: int) -> int:
        """See `ReferenceConfig.groups_in_hand`."""
        return self._config.groups_in_hand - in_hand

    def score(self, tasks: Sequence[ScoringTask], answer: Answer) -> None:
        """Answers all of them before it returns."""
        for batch in [[task] for task in tasks] if self._alone else [tasks]:
            rows = iter(self._logprobs([task.group for task in batch]))
            for task in batch:
                answer(task, REFERENCE, np.concatenate([next(rows) for _ in task.group.trajectories]))

    def gauges(self) -> dict[str, float]:
        """None of its own."""
        return {}

    def close(self) -> None:
        """Nothing was started."""

    @torch.inference_mode()
    def _logprobs(self, batch: list[Group]) -> list[np.ndarray]:
        """For each trajectory, float32 ``[tokens]``: 0 where nothing was sampled."""
        trajectories = [trajectory for group in batch for trajectory in group.trajectories]
        groups = [group.number for group in batch for _ in group.trajectories]
        share = shares_prompts(self._model)
        passes = plan_rows(trajectories, groups, self._config.tokens_per_batch, self._device, share)
        return by_trajectory(trajectories, passes, lambda rows: logprobs(self._model, rows, self._temperature))


def make(context: ActorContext, config: Any, kind: str) -> ScorerActor:
    """The actor, for a run's whole config."""
    torch.set_num_threads(context.threads)
    if config.run.deterministic:
        determinism.pin(context.folder, kind, context.threads)
    temperature = config.rollout.sampling.temperature
    reference = Reference(
        config.reference, context.model_path, config.model.dtype, temperature, config.run.deterministic
    )
    return ScorerActor(kind, context, reference)
