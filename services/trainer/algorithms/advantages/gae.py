"""Generalized advantage estimation: Schulman et al. 2015, arXiv:1506.02438; with λ by length, VAPO's: Yue et al. 2025,
arXiv:2504.05118."""

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
    length_alpha: float | None = None,
) -> torch.Tensor:
    """Estimates from each token's reward and the critic's ``values``, whitened over all valid tokens of the step. All
    ``[rows, length]`` but ``groups`` ``[rows]``, which has no part in it. With ``length_alpha`` the λ of a row is
    1 − 1 / (``length_alpha`` · its valid tokens), or 0 where that is below, in the place of ``lam``."""
    of_rows: float | torch.Tensor = lam
    if length_alpha is not None:
        of_rows = (1 - 1 / (length_alpha * mask.sum(-1).clamp(min=1))).clamp(min=0).to(rewards.dtype)
    estimates, _ = token_returns.gae(rewards, values.to(rewards.dtype) * mask, mask, gamma, of_rows)
    return token_returns.whiten(estimates, mask)
