"""The plain policy gradient: Williams 1992; as GPG's loss: Chu et al. 2025, arXiv:2504.02546."""

from __future__ import annotations

import torch

from penstock.services.learning.masked_mean import masked_mean
from penstock.services.trainer.algorithms.losses.ratio import weighted


def reinforce(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token losses -A log_prob, times the importance weights, which are constants. All tensors ``[rows, length]``."""
    metrics = {"approx_kl": masked_mean((old_log_prob - log_prob).detach(), mask)}
    return weighted(-log_prob * advantages, importance_weights), metrics
