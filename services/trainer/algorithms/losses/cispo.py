"""Clipped importance-sampling weights: MiniMax 2025, arXiv:2506.13585."""

from __future__ import annotations

import torch

from penstock.services.learning.masked_mean import masked_mean
from penstock.services.trainer.algorithms.losses.ratio import clamped_log_ratio, share, weighted


def cispo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_weights: torch.Tensor | None = None,
    clip_low: float = 1.0,
    clip_high: float = 2.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token losses -c A log_prob, c being the ratio within [1 - clip_low, 1 + clip_high], a constant. All tensors
    ``[rows, length]``."""
    log_ratio = clamped_log_ratio(log_prob, old_log_prob).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = {"clip_fraction": share(weight != ratio, mask), "approx_kl": masked_mean(-log_ratio, mask)}
    return weighted(-weight * advantages * log_prob, importance_weights), metrics
