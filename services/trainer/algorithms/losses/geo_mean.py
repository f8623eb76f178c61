"""Geometric-mean policy optimization (GMPO): Zhao et al. 2025, arXiv:2507.20673."""

from __future__ import annotations

import torch

from penstock.services.learning.masked_mean import masked_mean
from penstock.services.trainer.algorithms.losses.ratio import share


def geo_mean(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_weights: torch.Tensor | None = None,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A row's loss is -A exp(mean log-ratio), each log-ratio kept within [-clip_low, clip_high] on the side that the
    advantage's sign makes pessimistic; the importance weights enter by their geometric mean. Each valid token of the
    row has it, so that their mean is it. Advantages are constant along a row. All tensors ``[rows, length]``."""
    raw = log_prob - old_log_prob
    sign, bounded = advantages.sign(), raw.clamp(-clip_low, clip_high)
    kept = sign * torch.minimum(sign * raw, sign * bounded)
    valid = mask.to(raw.dtype)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return (values * valid).sum(-1, keepdim=True) / (valid.sum(-1, keepdim=True) + 1e-8)

    losses = -mean(advantages) * mean(kept).exp()
    if importance_weights is not None:
        losses = losses * mean((importance_weights + 1e-10).log()).exp()
    outside = bounded != raw
    metrics = {
        "clip_fraction_positive": share(outside & (advantages > 0), mask),
        "clip_fraction_negative": share(outside & (advantages < 0), mask),
        "approx_kl": masked_mean(-raw.detach(), mask),
    }
    return losses * valid, metrics
