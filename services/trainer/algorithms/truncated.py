"""Truncated importance sampling for rollout mismatch and staleness: Yao et al. 2025."""

from __future__ import annotations

import torch

from penstock.services.trainer.algorithms.masked_mean import LOG_RATIO_LIMIT, masked_mean


def truncated(
    train_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    mask: torch.Tensor,
    upper: float = 2.0,
    normalize: bool = False,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weights min(exp(train - rollout), upper) per token, 0 where ``mask`` is 0; all tensors ``[rows, length]``.

    ``normalize`` divides by the mean over valid tokens. Metrics are those before normalising; high and low are the
    shares of tokens whose raw ratio is above ``upper`` and below ``1 / upper``.
    """
    log_ratio = (train_log_prob - rollout_log_prob).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    weights = ratio.clamp(max=upper) * mask
    mean = masked_mean(weights, mask)
    squares = masked_mean(weights**2, mask)
    valid = mask.to(weights.dtype)
    metrics = {
        "mean": mean,
        "std": (masked_mean((weights - mean) ** 2, mask)).sqrt(),
        "effective_sample_fraction": mean**2 / squares.clamp(min=1e-30),
        "fraction_high": masked_mean((ratio > upper).to(valid.dtype), mask),
        "fraction_low": masked_mean((ratio < 1 / upper).to(valid.dtype), mask),
    }
    return (weights / mean if normalize else weights), metrics
