"""Costs that are kept below a limit, by Lagrange multipliers: Dai et al. 2023, arXiv:2310.12773 (Safe RLHF), eq. 9 and
29."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from penstock.protocols.columns import REWARD
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.config import ConstraintConfig


def with_known_costs(step: TrainingBatch, constraints: Sequence[ConstraintConfig]) -> TrainingBatch:
    """Without a reward where a cost is not known, since what would be learned from there is not either. (The broker
    sees to that, but for groups of a run that had no such constraint yet.)"""
    known = np.ones(len(step.trajectories), bool)
    for constraint in constraints:
        known &= np.isfinite(step.values[constraint.column])
    if known.all():
        return step
    return replace(step, values={**step.values, REWARD: np.where(known, step.rewards, np.float32(np.nan))})


def multiplier_of(constraint: ConstraintConfig, state: dict[str, float]) -> float:
    """λ as the step finds it: as it has become, or as the config has it, where a run was resumed with another start."""
    now, began = f"multiplier/{constraint.column}", f"multiplier_began/{constraint.column}"
    if state.get(began, constraint.initial) != constraint.initial:
        state.pop(now, None)
    state[began] = constraint.initial
    return state.get(now, constraint.initial)


def risen(multiplier: float, mean_cost: float, constraint: ConstraintConfig) -> float:
    """λ after a step with this mean cost: its logarithm rises by `ConstraintConfig.rate` times how far the cost is
    above the limit, and falls where it is below. (Eq. 29 has λ as a factor of that too; without it λ also leaves a
    small start.)"""
    grown = math.log(max(multiplier, 1e-6)) + constraint.rate * (mean_cost - constraint.limit)
    return min(math.exp(min(grown, 50.0)), constraint.largest)


def lagrangian(
    scores: torch.Tensor, costs: Sequence[torch.Tensor], multipliers: Sequence[float]
) -> tuple[torch.Tensor, float]:
    """(R − Σ λ C) / (1 + Σ λ) of each row, ``[rows]``, and the divisor, which keeps its size where λ grows."""
    divisor = 1.0 + sum(multipliers)
    paid = sum(m * cost for m, cost in zip(multipliers, costs, strict=True))
    return (scores - paid) / divisor, divisor
