"""Variational sequence-level soft policy optimization: VESPO 2026, arXiv:2602.10693."""

from __future__ import annotations

import torch

from penstock.services.learning.masked_mean import masked_mean
from penstock.services.trainer.algorithms.losses.ratio import sequence_log_ratio, weighted


def vespo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_weights: torch.Tensor | None = None,
    power_pos: float = 2.0,
    decay_pos: float = 3.0,
    power_neg: float = 3.0,
    decay_neg: float = 2.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token losses -A φ(w) log_prob, the constant φ(w) being w^power exp(decay (1 - w)), which is 1 at w = 1, and w the
    product of the row's token ratios; the options' pairs are for advantages from 0 on, and below. All tensors
    ``[rows, length]``."""
    log_ratio = sequence_log_ratio(log_prob, old_log_prob, mask)
    good = advantages >= 0
    power, decay = torch.where(good, power_pos, power_neg), torch.where(good, decay_pos, decay_neg)
    weight = (power * log_ratio + decay * (1 - log_ratio.exp())).exp()
    metrics = {
        "sequence_weight": masked_mean(weight, mask),
        "approx_kl": masked_mean((old_log_prob - log_prob).detach(), mask),
    }
    return weighted(-advantages * weight * log_prob, importance_weights), metrics
