"""PRIME: Cui et al. 2025, arXiv:2502.01456, eq. 5."""

from __future__ import annotations

import torch

from penstock.services.learning.token_returns import discounted
from penstock.services.trainer.algorithms.advantages.group_stats import Groups
from penstock.services.trainer.algorithms.advantages.rloo import rloo


def prime(
    tokens: torch.Tensor,
    mask: torch.Tensor,
    groups: torch.Tensor,
    process: torch.Tensor,
    *,
    share: float,
    gamma: float,
) -> torch.Tensor:
    """The outcome, less the mean of the group's others, on each token; and ``share`` times what is still to come of the
    ``process`` rewards ``[rows, length]``, each less the mean of what the group's others have a token, discounted by
    ``gamma``. The outcome is the sum of a row's ``tokens`` ``[rows, length]``. Of a group of one nothing is taken
    off."""
    outcome = rloo(tokens.sum(-1), mask, groups)
    process = process.to(tokens.dtype) * mask
    each = process.sum(-1) / mask.sum(-1).clamp(min=1)
    others = each - Groups.of(groups, each.dtype).beside_others(each, std=False)
    return outcome + share * discounted((process - others[:, None]) * mask, mask, gamma)
