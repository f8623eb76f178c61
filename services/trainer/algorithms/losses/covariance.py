"""Tokens by how their advantage and their log-probability go together: Cui et al. 2025, arXiv:2505.22617, eq. 10."""

from __future__ import annotations

import torch


def covariance(log_prob: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(A − mean A) (log π − mean log π) of each token, ``[rows, length]``, means being over all valid tokens."""
    valid = mask.to(log_prob.dtype)
    count = valid.sum().clamp(min=1)
    centred = [values - (values * valid).sum() / count for values in (advantages, log_prob)]
    return centred[0] * centred[1]


def how_many(share: float, mask: torch.Tensor) -> int:
    """So large a share of the valid tokens; at least one."""
    return max(1, int(share * int(mask.sum())))
