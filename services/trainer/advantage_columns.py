"""What an advantage is given beside the rewards, as far as no model says it."""

from __future__ import annotations

import numpy as np
import torch

from penstock.protocols.columns import BASELINE, GREEDY, SAMPLED, STATES
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.token_rewards import TokenRewards, shaped
from penstock.services.runtime.errors import SetupError
from penstock.services.trainer.algorithm_config import AlgorithmConfig
from penstock.services.trainer.prompt_tracker import names_of, tracked_values
from penstock.services.trainer.running_advantages import PromptAdvantage, RoleAdvantage
from penstock.services.trainer.running_baseline import roles_of, running_baselines
from penstock.services.trainer.turn_states import turn_states


def advantage_columns(
    step: TrainingBatch, rows: np.ndarray, config: AlgorithmConfig, rewards: TokenRewards, state: dict[str, float]
) -> dict[str, torch.Tensor]:
    """By name, of these ``rows``, which ``rewards`` are of: columns of the step, ``[rows]`` or ``[rows, longest]``, and
    what `Traits.given` names. ``state`` is the learner's: running baselines go on in it. Raises `SetupError` where the
    step was taken when nobody asked for what is read."""
    advantage = config.advantage
    found = {name: step.column(name, rows, name not in step.values or advantage.by_token) for name in advantage.columns}
    if config.teacher_advantage:
        found |= {name: step.column(name, rows) for name in config.teacher_advantage.teachers}
    if step.greedy is not None:
        found[GREEDY] = shaped(torch.from_numpy(step.greedy[rows]), config.reward_shape)
    elif advantage.type == "remax":
        raise SetupError(
            "trainer.algorithm.advantage: remax, and a step was taken before the run had greedy answers; go on with "
            "the advantage that it had until a checkpoint covers that step"
        )
    found[SAMPLED] = step.padded([t.logprobs for t in step.trajectories], rows)
    if STATES in advantage.given:
        found[STATES] = step.padded(turn_states(step.trajectories, step.sessions), rows)
    if isinstance(advantage, RoleAdvantage):
        roles = roles_of(step, rows, advantage.role)
        told = rewards.scores.tolist(), roles, step.sessions[rows].tolist()
        found[BASELINE] = torch.from_numpy(running_baselines(*told, advantage.decay, state))
    if isinstance(advantage, PromptAdvantage):
        told = rewards.scores.tolist(), names_of(step, rows), step.sessions[rows].tolist()
        found[BASELINE] = torch.from_numpy(tracked_values(*told, advantage.decay, advantage.prior, state))
    return found
