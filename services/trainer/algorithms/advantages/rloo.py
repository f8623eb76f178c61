"""Leave-one-out: Ahmadian et al. 2024, arXiv:2402.14740."""

from __future__ import annotations

import torch

from penstock.services.trainer.algorithms.advantages.group_stats import Groups


def rloo(scores: torch.Tensor, mask: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Each row's reward, less the mean of its group's other members. Shapes as for `grpo`. A group of one keeps its
    score: it has no baseline."""
    among = Groups.of(groups, scores.dtype)
    count, total = among.count[among.member], among.sum(scores)[among.member]
    others = torch.where(count > 1, (total - scores) / (count - 1).clamp(min=1), 0.0)
    return (scores - others)[:, None] * mask
