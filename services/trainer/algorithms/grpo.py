"""Group-relative advantages: Shao et al. 2024, arXiv:2402.03300; without the standard deviation Liu et al. 2025,
arXiv:2503.20783."""

from __future__ import annotations

import torch


def grpo(scores: torch.Tensor, mask: torch.Tensor, groups: torch.Tensor, std: bool = True) -> torch.Tensor:
    """Each row's reward, less its group's mean, divided by (the group's unbiased standard deviation + 1e-6).

    ``scores`` ``[rows]``: the whole reward of each row; ``groups`` ``[rows]``: any integer that is the same within a
    group. Returns ``[rows, length]``: the row's advantage on valid tokens, 0 elsewhere. A group of one has mean 0 and
    standard deviation 1.
    """
    _, member = torch.unique(groups, return_inverse=True)
    count = torch.bincount(member).to(scores.dtype)
    total = torch.zeros_like(count).index_add_(0, member, scores)
    mean = torch.where(count > 1, total / count, 0.0)
    centred = scores - mean[member]
    if std:
        squares = torch.zeros_like(count).index_add_(0, member, centred**2)
        deviation = torch.where(count > 1, (squares / (count - 1).clamp(min=1)).sqrt(), 1.0)
        centred = centred / (deviation[member] + 1e-6)
    return centred[:, None] * mask
