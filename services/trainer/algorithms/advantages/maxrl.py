"""Maximum-likelihood RL: MaxRL 2026, arXiv:2602.02710."""

from __future__ import annotations

import torch

from penstock.services.trainer.algorithms.advantages.group_stats import Groups


def maxrl(scores: torch.Tensor, mask: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(reward - the group's mean) / the group's mean; 0 where that is not above 0. With rewards of 0 and 1 its gradient
    is that of the mean log-likelihood of the group's successes: rare ones count more. Shapes as for `grpo`; a group of
    one has 0."""
    among = Groups.of(groups, scores.dtype)
    mean = among.mean(scores)[among.member]
    return torch.where(mean > 0, (scores - mean) / torch.where(mean > 0, mean, 1.0), 0.0)[:, None] * mask
