"""What each token of a step is rewarded with: the reward, in the shape that learners see, on the last token but for the
parts of it that lie elsewhere, less a penalty for leaving the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from penstock.protocols.columns import REFERENCE
from penstock.protocols.experience import mean_by_session, over_session
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.config import ConstraintConfig, KLConfig, Penalties, RewardShape
from penstock.services.learning.constraints import lagrangian, multiplier_of, risen
from penstock.services.learning.kl_in_reward import adapted, kl_in_reward
from penstock.services.learning.token_returns import on_last_token

COEFFICIENT, BEGAN = "kl_coefficient", "kl_coefficient_began"
"""In a learner's `state`, where it adapts."""


@dataclass(frozen=True)
class TokenRewards:
    """Of some rows of a step: float64, on the host."""

    scores: torch.Tensor
    """``[rows]``: the whole of each."""
    tokens: torch.Tensor
    """``[rows, longest]``: where it lies."""
    mask: torch.Tensor
    """``[rows, longest]``: 1 where a token was sampled."""
    metrics: dict[str, float]

    def of(self, kept: np.ndarray, longest: int) -> TokenRewards:
        """int64 ``[kept]``: of these rows alone, which have ``longest`` tokens at most."""
        tokens, mask = self.tokens[kept, :longest], self.mask[kept, :longest]
        return replace(self, scores=self.scores[kept], tokens=tokens, mask=mask)


def token_rewards(step: TrainingBatch, rows: np.ndarray, penalties: Penalties, state: dict[str, float]) -> TokenRewards:
    """Of these ``rows``, all of which have a reward. Coefficient and multipliers of the next step go into ``state``:
    they follow from the steps alone, so every learner that takes them has the same. The divergence is that of the
    policy that sampled, for the same reason. Means are of what was sampled: given answers cost the policy nothing."""
    found = _shaped(_whole(step, rows), penalties.shape, ~step.given[rows])
    found = _with_constraints(found, step, rows, penalties.constraints, state)
    return _less_kl(found, step, rows, penalties.kl, state)


def shaped(scores: torch.Tensor, shape: RewardShape) -> torch.Tensor:
    """``scores``, of whatever shape and dtype, as learners see them."""
    found = (scores + shape.shift) * shape.scale
    return found if shape.low is None and shape.high is None else found.clamp(shape.low, shape.high)


def _shaped(found: TokenRewards, shape: RewardShape, own: np.ndarray) -> TokenRewards:
    """With what lies on single tokens only scaled: what the whole is more or less than their sum lies on the last.
    ``own``: the rows that were sampled."""
    if not shape.changes:
        return found
    scores = shaped(found.scores, shape)
    tokens = found.tokens * shape.scale
    tokens = tokens + on_last_token(scores - found.scores * shape.scale, found.mask)
    metrics = {"reward_shaped": float(scores[own].mean())} if own.any() else {}
    return TokenRewards(scores, tokens, found.mask, metrics)


def _whole(step: TrainingBatch, rows: np.ndarray) -> TokenRewards:
    mask = step.padded([t.loss_mask for t in step.trajectories], rows).double()
    scores = torch.from_numpy(step.rewards[rows].astype(np.float64))
    if step.placed is None:
        tokens = on_last_token(scores, mask)
    else:
        placed = step.padded(step.placed, rows).double() * mask
        tokens = on_last_token(scores - placed.sum(-1), mask) + placed
    return TokenRewards(scores, tokens, mask, {})


def _with_constraints(
    found: TokenRewards,
    step: TrainingBatch,
    rows: np.ndarray,
    constraints: tuple[ConstraintConfig, ...],
    state: dict[str, float],
) -> TokenRewards:
    if not constraints or not rows.size:
        return found
    costs = [torch.from_numpy(step.values[c.column][rows].astype(np.float64)) for c in constraints]
    multipliers = [multiplier_of(c, state) for c in constraints]
    scores, divisor = lagrangian(found.scores, costs, multipliers)
    tokens = found.tokens / divisor + on_last_token(scores - found.scores / divisor, found.mask)
    own = ~step.given[rows]
    for constraint, cost, multiplier in zip(constraints, costs, multipliers, strict=True) if own.any() else ():
        mean = np.nanmean(mean_by_session(cost.numpy()[own], step.sessions[rows][own]))
        state[f"multiplier/{constraint.column}"] = risen(multiplier, float(mean), constraint)
    metrics = found.metrics | {f"multiplier/{c.column}": m for c, m in zip(constraints, multipliers, strict=True)}
    return TokenRewards(scores, tokens, found.mask, metrics)


def _less_kl(
    found: TokenRewards, step: TrainingBatch, rows: np.ndarray, penalty: KLConfig, state: dict[str, float]
) -> TokenRewards:
    if not penalty.in_reward:
        return found
    scores, tokens, mask = found.scores, found.tokens, found.mask
    sampled = step.padded([t.logprobs for t in step.trajectories], rows).double()
    reference = step.padded(step.token_values[REFERENCE], rows).double()
    kl, mean = kl_in_reward(sampled, reference, mask, penalty.kind)
    coefficient = _coefficient(penalty, state)
    if penalty.target is not None:
        state[COEFFICIENT] = adapted(coefficient, mean, penalty.target, penalty.horizon, len(rows))
    metrics = found.metrics | {"reward_kl": mean, "kl_coefficient": coefficient}
    # An agent's session left the reference by what all its branches did; each of these is worth the whole.
    whole = torch.from_numpy(over_session(kl.sum(-1).numpy(), step.sessions[rows]))
    return TokenRewards(scores - coefficient * whole, tokens - coefficient * kl, mask, metrics)


def _coefficient(penalty: KLConfig, state: dict[str, float]) -> float:
    """As it has become; as the config has it, where nothing adapts it, or a run was resumed with another one."""
    if penalty.target is None or state.get(BEGAN, penalty.coefficient) != penalty.coefficient:
        state.pop(COEFFICIENT, None)
        state.pop(BEGAN, None)
    if penalty.target is not None:
        state[BEGAN] = penalty.coefficient
    return state.get(COEFFICIENT, penalty.coefficient)
