"""Leave-one-out: Ahmadian et al. 2024, arXiv:2402.14740."""

from __future__ import annotations

import torch

from penstock.services.trainer.algorithms.advantages.grpo import grpo


def rloo(scores: torch.Tensor, mask: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Each row's reward, less the mean of its group's other members. Shapes as for `grpo`. A group of one keeps its
    score: it has no baseline."""
    return grpo(scores, mask, groups, std=False, leave_one_out=True)
