"""Group sequence policy optimization: Zheng et al. 2025, arXiv:2507.18071, equations 7 and 12."""

from __future__ import annotations

import torch

from penstock.services.learning.masked_mean import masked_mean
from penstock.services.trainer.algorithms.losses.ratio import share, weighted

LIMIT = 10.0
"""A sequence's log-ratio is capped at it."""


def gspo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_weights: torch.Tensor | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token losses max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s being the geometric mean of the row's token
    ratios, whose gradient flows to each token through its own log_prob alone. All tensors ``[rows, length]``."""
    raw = log_prob - old_log_prob
    mean = (raw * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = (mean.detach() + log_prob - log_prob.detach()).clamp(max=LIMIT).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = {"clip_fraction": share(clipped > plain, mask), "approx_kl": masked_mean(-raw.detach(), mask)}
    return weighted(torch.maximum(plain, clipped), importance_weights), metrics
