"""Self-play preference optimization: Wu et al. 2024, arXiv:2405.00675, eq. 4.4."""

from __future__ import annotations

import torch

from penstock.services.learning.masked_mean import masked_mean
from penstock.services.trainer.algorithms.losses.ratio import sequence_log_ratio, weighted


def sppo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_weights: torch.Tensor | None = None,
    eta: float = 1.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token losses -(A - S / eta) log_prob, S being the row's log-ratio (the sum of its tokens') as a constant: summed
    over a row their gradient is that of the paper's square (S - eta A)², divided by 2 eta, which draws S to eta A. All
    tensors ``[rows, length]``."""
    log_ratio = sequence_log_ratio(log_prob, old_log_prob, mask)
    losses = -(advantages - log_ratio / eta) * log_prob
    metrics = {
        "preference_error": masked_mean((log_ratio - eta * advantages).square(), mask),
        "approx_kl": masked_mean((old_log_prob - log_prob).detach(), mask),
    }
    return weighted(losses, importance_weights), metrics
