"""Truncated importance sampling for rollout mismatch and staleness: Yao et al. 2025; over sequences: Liu et al. 2025,
"When Speed Kills Stability"."""

from __future__ import annotations

import torch

from penstock.services.trainer.algorithms.corrections.weights import describe, ratios


def truncated(
    train_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    mask: torch.Tensor,
    upper: float = 2.0,
    level: str = "token",
    lower: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weights min(exp(train - rollout), upper), and at least ``lower`` where it is given, per token, or per row of the
    product over its valid tokens; 0 where ``mask`` is. All tensors ``[rows, length]``. Metrics: `weights.describe`,
    ``fraction_low`` being below ``lower``, or 1 / upper."""
    ratio = ratios(train_log_prob, rollout_log_prob, mask, level)
    weights = ratio.clamp(lower, upper) * mask
    return weights, describe(weights, ratio, mask, level, 1 / upper if lower is None else lower, upper)
