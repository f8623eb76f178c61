"""Direct reward optimisation: Richemond et al. 2024, arXiv:2405.19107."""

from __future__ import annotations

import torch

from penstock.services.learning.masked_mean import masked_mean
from penstock.services.trainer.algorithms.losses.ratio import weighted


def dro(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_weights: torch.Tensor | None = None,
    beta: float = 0.1,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token losses -(A log_prob - beta / 2 (log_prob - old_log_prob)²). All tensors ``[rows, length]``."""
    log_ratio = log_prob - old_log_prob
    losses = -(log_prob * advantages - beta / 2 * log_ratio.square())
    return weighted(losses, importance_weights), {"approx_kl": masked_mean(-log_ratio.detach(), mask)}
