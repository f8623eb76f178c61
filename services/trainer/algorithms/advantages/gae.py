"""Generalized advantage estimation: Schulman et al. 2015, arXiv:1506.02438."""

from __future__ import annotations

import torch

from penstock.services.learning import token_returns


def gae(
    rewards: torch.Tensor,
    mask: torch.Tensor,
    groups: torch.Tensor,
    values: torch.Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> torch.Tensor:
    """Estimates from each token's reward and the critic's ``values``, whitened over all valid tokens of the step. All
    ``[rows, length]`` but ``groups`` ``[rows]``, which has no part in it."""
    estimates, _ = token_returns.gae(rewards, values.to(rewards.dtype) * mask, mask, gamma, lam)
    return token_returns.whiten(estimates, mask)
