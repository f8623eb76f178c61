"""The clipped surrogate: Schulman et al. 2017, arXiv:1707.06347; dual clip: Ye et al. 2020, arXiv:1912.09729;
asymmetric clip: Yu et al. 2025, arXiv:2503.14476."""

from __future__ import annotations

import torch

from penstock.services.trainer.algorithms.masked_mean import LOG_RATIO_LIMIT, masked_mean


def ppo_clip(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_weights: torch.Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token losses max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(log_prob - old_log_prob), capped at
    -A dual_clip for negative A, times the importance weights. All tensors ``[rows, length]``; the losses too.
    """
    log_ratio = (log_prob - old_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    worse = torch.maximum(plain, clipped)
    cap = -advantages * dual_clip
    negative = advantages < 0
    losses = torch.where(negative, torch.minimum(worse, cap), worse)
    if importance_weights is not None:
        losses = losses * importance_weights
    metrics = {
        "clip_fraction": masked_mean((clipped > plain).to(losses.dtype), mask),
        "clip_fraction_dual": masked_mean(((worse > cap) & negative).to(losses.dtype), mask),
        "approx_kl": masked_mean(-log_ratio.detach(), mask),
    }
    return losses, metrics
