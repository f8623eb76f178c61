"""Generalized advantage estimation: Schulman et al. 2015, arXiv:1506.02438."""

from __future__ import annotations

import torch

from penstock.services.learning import token_returns


def gae(
    scores: torch.Tensor,
    mask: torch.Tensor,
    groups: torch.Tensor,
    values: torch.Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> torch.Tensor:
    """Estimates from the critic's ``values`` ``[rows, length]``, the reward lying on the row's last valid token,
    whitened over all valid tokens of the step. Shapes as for `grpo`; ``groups`` has no part in it."""
    rewards = token_returns.on_last_token(scores, mask)
    estimates, _ = token_returns.gae(rewards, values.to(scores.dtype) * mask, mask, gamma, lam)
    return token_returns.whiten(estimates, mask)
