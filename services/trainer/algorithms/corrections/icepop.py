"""Importance weights inside a band alone: IcePop, Ling team 2025, arXiv:2510.18855."""

from __future__ import annotations

import torch

from penstock.services.trainer.algorithms.corrections.weights import describe, ratios


def icepop(
    train_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    mask: torch.Tensor,
    upper: float = 5.0,
    lower: float = 0.5,
    level: str = "token",
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weights exp(train - rollout) per token, or per row of the product, where within [lower, upper]; 0 elsewhere, and
    where ``mask`` is. All tensors ``[rows, length]``."""
    ratio = ratios(train_log_prob, rollout_log_prob, mask, level)
    weights = torch.where((ratio >= lower) & (ratio <= upper), ratio, 0.0) * mask
    return weights, describe(weights, ratio, mask, level, lower, upper)
