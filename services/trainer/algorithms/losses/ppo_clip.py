"""The clipped surrogate: Schulman et al. 2017, arXiv:1707.06347; dual clip: Ye et al. 2020, arXiv:1912.09729;
asymmetric clip: Yu et al. 2025, arXiv:2503.14476."""

from __future__ import annotations

import torch

from penstock.services.learning.masked_mean import masked_mean
from penstock.services.trainer.algorithms.losses.ratio import clamped_log_ratio, share, weighted


def ppo_clip(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_weights: torch.Tensor | None = None,
    lags: torch.Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    lag_exponent: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token losses max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(log_prob - old_log_prob), capped at
    -A dual_clip for negative A (None: not), times the importance weights. All tensors ``[rows, length]``; the losses
    too. With ``lags``, in versions, the clip's width of each token is (1 + lag)^-lag_exponent of what it is.
    """
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    width = 1.0 if lags is None else (1 + lags.to(ratio.dtype)) ** -lag_exponent
    clipped = -advantages * ratio.clamp(1 - clip_low * width, 1 + clip_high * width)
    worse = torch.maximum(plain, clipped)
    cap = -advantages * (torch.inf if dual_clip is None else dual_clip)
    negative = advantages < 0
    losses = torch.where(negative, torch.minimum(worse, cap), worse)
    metrics = {
        "clip_fraction": share(clipped > plain, mask),
        "clip_fraction_dual": share((worse > cap) & negative, mask),
        "approx_kl": masked_mean(-log_ratio.detach(), mask),
    }
    return weighted(losses, importance_weights), metrics
