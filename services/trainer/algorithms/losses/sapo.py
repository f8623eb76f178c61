"""Soft adaptive policy optimization: Gao et al. 2025, arXiv:2511.20347."""

from __future__ import annotations

import torch

from penstock.services.learning.masked_mean import masked_mean
from penstock.services.trainer.algorithms.losses.ratio import clamped_log_ratio, weighted


def sapo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_weights: torch.Tensor | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token losses -A sigmoid(tau (r - 1)) 4 / tau, tau being tau_pos for advantages above 0, else tau_neg. All tensors
    ``[rows, length]``."""
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    return weighted(-advantages * gate, importance_weights), {"approx_kl": masked_mean(-log_ratio.detach(), mask)}
