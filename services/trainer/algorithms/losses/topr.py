"""Tapered off-policy REINFORCE: Le Roux et al. 2025, arXiv:2503.14286."""

from __future__ import annotations

import torch

from penstock.services.learning.masked_mean import masked_mean
from penstock.services.trainer.algorithms.losses.ratio import sequence_log_ratio, share, weighted


def topr(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_weights: torch.Tensor | None = None,
    upper: float = 1.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token losses -A w log_prob, the constant w being 1 for advantages from 0 on, and below min(the product of the
    row's token ratios, upper). All tensors ``[rows, length]``."""
    ratio = sequence_log_ratio(log_prob, old_log_prob, mask).exp()
    bad = advantages < 0
    weight = torch.where(bad, ratio.clamp(max=upper), 1.0)
    metrics = {
        "tapered_fraction": share(bad & (ratio < upper), mask),
        "approx_kl": masked_mean((old_log_prob - log_prob).detach(), mask),
    }
    return weighted(-advantages * weight * log_prob, importance_weights), metrics
