"""The best of a group alone: Tang et al. 2025, arXiv:2503.19595."""

from __future__ import annotations

import torch

from penstock.services.trainer.algorithms.advantages.group_stats import Groups


def grpo_passk(scores: torch.Tensor, mask: torch.Tensor, groups: torch.Tensor, normalize: bool = True) -> torch.Tensor:
    """The best row of each group has (best - second best) / (the group's unbiased standard deviation + 1e-6), the
    latter where ``normalize``; all others 0, and a tie for the best 0. A group of one has 0. Shapes as for `grpo`."""
    among = Groups.of(groups, scores.dtype)
    size = len(among.count)
    best = scores.new_full((size,), -torch.inf).scatter_reduce(0, among.member, scores, "amax")
    is_best = scores == best[among.member]
    several = among.sum(is_best.to(scores.dtype)) > 1
    rest = torch.where(is_best, -torch.inf, scores)
    second = scores.new_full((size,), -torch.inf).scatter_reduce(0, among.member, rest, "amax")
    gap = torch.where(several | second.isinf(), 0.0, best - second)
    if normalize:
        gap = gap / (among.deviation(scores) + 1e-6)
    return torch.where(is_best, gap[among.member], 0.0)[:, None] * mask
