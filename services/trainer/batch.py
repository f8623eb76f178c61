"""A taken batch as trajectories, rewards and columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.protocols.experience import Trajectory, unpack_group
from penstock.protocols.messages import Batch, TakenGroup


class BatchError(ValueError):
    """A batch that breaks a promise: a token older than the bound, or from a version that does not exist yet."""


@dataclass(frozen=True)
class TrainingBatch:
    """What one step trains on. Lists are over trajectories, in the order of the ledger."""

    trajectories: list[Trajectory]
    rewards: np.ndarray
    """float32 ``[trajectories]``; NaN where the reward failed: such a one has no part in its group's advantage."""
    groups: np.ndarray
    """int64 ``[trajectories]``: the number of its group."""
    reference: list[np.ndarray] | None
    """float32 ``[tokens]`` each: reference log-probabilities."""

    @property
    def rewarded(self) -> np.ndarray:
        """bool ``[trajectories]``"""
        return ~np.isnan(self.rewards)

    def lags(self, version: int) -> np.ndarray:
        """int32 ``[sampled tokens]``: how many versions each sampled token is behind ``version``."""
        return version - np.concatenate([t.versions[t.loss_mask == 1] for t in self.trajectories])


def open_batch(batch: Batch, max_lag: int) -> TrainingBatch:
    """Unpacks and checks ``batch``. Raises `BatchError`, `ExperienceError` or `WireError`."""
    trajectories: list[Trajectory] = []
    reference: list[np.ndarray] | None = [] if all(g.reference is not None for g in batch.groups) else None
    rewards: list[np.ndarray] = []
    groups: list[int] = []
    for taken in batch.groups:
        group = unpack_group(taken.experience.data)
        trajectories += group.trajectories
        rewards.append(taken.rewards)
        groups += [taken.number] * len(group.trajectories)
        if reference is not None:
            reference += _split(taken, group.trajectories)
    step = TrainingBatch(trajectories, np.concatenate(rewards), np.array(groups, np.int64), reference)
    if len(step.rewards) != len(trajectories):
        raise BatchError(f"step {batch.step}: {len(step.rewards)} rewards for {len(trajectories)} trajectories")
    lags = step.lags(batch.step)
    if lags.size and not 0 <= lags.min() <= lags.max() <= max_lag:
        raise BatchError(f"step {batch.step}: lags from {lags.min()} to {lags.max()}, bound {max_lag}")
    return step


def _split(taken: TakenGroup, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    assert taken.reference is not None
    bounds = np.cumsum([len(t.tokens) for t in trajectories])
    if len(taken.reference) != bounds[-1]:
        raise BatchError(f"group {taken.number}: {len(taken.reference)} reference values for {bounds[-1]} tokens")
    return np.split(taken.reference, bounds[:-1])
