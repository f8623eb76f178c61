"""REINFORCE++: Hu et al. 2025, arXiv:2501.03262."""

from __future__ import annotations

import torch

from penstock.services.learning.token_returns import discounted, whiten
from penstock.services.trainer.algorithms.advantages.group_stats import Groups


def reinforce_plus_plus(
    rewards: torch.Tensor, mask: torch.Tensor, groups: torch.Tensor, gamma: float = 1.0
) -> torch.Tensor:
    """Returns of each token from each token's reward, whitened over all valid tokens of the step. All
    ``[rows, length]`` but ``groups`` ``[rows]``, which has no part in it."""
    return whiten(discounted(rewards, mask, gamma), mask)


def reinforce_plus_plus_baseline(scores: torch.Tensor, mask: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Rewards less their group's mean, whitened over all valid tokens of the step: long rows weigh more. Shapes as for
    `grpo`; a group of one keeps its score."""
    return whiten(Groups.of(groups, scores.dtype).centred(scores)[:, None] * mask, mask)
