"""Clip-Cov: Cui et al. 2025, arXiv:2505.22617, eq. 11 and 12."""

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
    clip_low: float,
    clip_high: float,
    cov_low: float,
    cov_high: float,
    drop_fraction: float,
) -> torch.Tensor:
    """bool ``[rows, length]``: of the tokens of a whole update those that lose their loss. At most ``drop_fraction`` of
    all, drawn from those that are not clipped and whose covariance lies between the bounds."""
    ratio = clamped_log_ratio(log_prob, old_log_prob).exp()
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high) > -advantages * ratio
    found = covariance(log_prob, advantages, mask)
    fit = torch.nonzero((mask.bool() & ~clipped & (found > cov_low) & (found < cov_high)).flatten())[:, 0]
    drawn = fit[torch.randperm(len(fit), generator=generator)[: how_many(drop_fraction, mask)]]
    picked = torch.zeros(mask.numel(), dtype=torch.bool)
    picked[drawn] = True
    return picked.view(mask.shape)


def clip_cov(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_weights: torch.Tensor | None,
    picked: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token losses max(-A r, -A clip(r)), 0 where ``picked`` is 1, times the importance weights; ``[rows, length]``."""
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    ratio = log_ratio.exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = {
        "clip_fraction": share(clipped > plain, mask),
        "dropped_fraction": share(picked > 0, mask),
        "approx_kl": masked_mean(-log_ratio.detach(), mask),
    }
    return weighted(torch.maximum(plain, clipped) * (1 - picked), importance_weights), metrics
