"""KL-Cov: Cui et al. 2025, arXiv:2505.22617, eq. 13 and 14."""

from __future__ import annotations

import torch

from penstock.services.learning.masked_mean import masked_mean
from penstock.services.trainer.algorithms.losses.covariance import covariance, how_many
from penstock.services.trainer.algorithms.losses.ratio import clamped_log_ratio, share, weighted


def pick(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    generator: torch.Generator,
    top_fraction: float,
) -> torch.Tensor:
    """bool ``[rows, length]``: of the tokens of a whole update those with the largest covariance, ``top_fraction`` of
    all."""
    found = covariance(log_prob, advantages, mask).masked_fill(~mask.bool(), -torch.inf).flatten()
    picked = torch.zeros(mask.numel(), dtype=torch.bool)
    picked[found.topk(min(how_many(top_fraction, mask), int(mask.sum()))).indices] = True
    return picked.view(mask.shape)


def kl_cov(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_weights: torch.Tensor | None,
    picked: torch.Tensor,
    kl_coef: float = 1.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token losses -A r, and ``kl_coef`` · |log r| more where ``picked`` is 1, times the importance weights; ``[rows,
    length]``."""
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    losses = -advantages * log_ratio.exp() + kl_coef * picked * log_ratio.abs()
    metrics = {
        "penalized_fraction": share(picked > 0, mask),
        "mean_abs_log_ratio": masked_mean(log_ratio.detach().abs(), mask),
        "approx_kl": masked_mean(-log_ratio.detach(), mask),
    }
    return weighted(losses, importance_weights), metrics
