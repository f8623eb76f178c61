"""Importance weights of the trainer's policy over the one that sampled, and what is said of them."""

from __future__ import annotations

import math

import torch

from penstock.services.learning.masked_mean import LOG_RATIO_LIMIT, masked_mean


def ratios(train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """exp(train - rollout) of each token, or with ``level`` "sequence" of the sum over a row's valid tokens, on each of
    them; log-ratios within ±20. ``[rows, length]``, no gradient."""
    log_ratio = (train - rollout).detach() * mask
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def mean_terms(weights: torch.Tensor, mask: torch.Tensor, level: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and count that make the mean by which weights are normalised: over valid tokens, or rows that have any."""
    if level == "token":
        return (weights * mask).sum(), mask.sum()
    return (weights * mask).amax(-1).sum(), mask.any(-1).sum()


SHARES = ("fraction_high", "fraction_low")
"""Of `describe`: of tokens, or of rows."""


def spread(mean: float, square: float) -> dict[str, float]:
    """Standard deviation, and effective sample size as a share, of weights whose mean and mean square these are."""
    return {
        "std": math.sqrt(max(0.0, square - mean**2)),
        "effective_sample_fraction": mean**2 / max(square, 1e-30),
    }


def describe(
    weights: torch.Tensor, ratio: torch.Tensor, mask: torch.Tensor, level: str, lower: float, upper: float
) -> dict[str, torch.Tensor]:
    """Means of the weights and of their squares over valid tokens, of which `spread` makes the rest; the shares of
    tokens, or of rows, whose ratio is outside [``lower``, ``upper``]."""
    one = mask if level == "token" else mask.any(-1)
    ratio = ratio if level == "token" else ratio[:, 0]
    return {
        "mean": masked_mean(weights, mask),
        "square": masked_mean(weights**2, mask),
        "fraction_high": masked_mean((ratio > upper).to(weights.dtype), one),
        "fraction_low": masked_mean((ratio < lower).to(weights.dtype), one),
    }
