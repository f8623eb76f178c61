"""The baseline of least variance where all tokens count alike: Hao et al. 2025, arXiv:2505.23585."""

from __future__ import annotations

import torch

from penstock.services.trainer.algorithms.advantages.group_stats import Groups


def opo(scores: torch.Tensor, mask: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Each row's reward, less its group's mean weighted by length (valid tokens). Shapes as for `grpo`. A group of one
    has baseline 0."""
    among, length = Groups.of(groups, scores.dtype), mask.sum(-1)
    baseline = among.sum(scores * length) / among.sum(length).clamp(min=1e-8)
    baseline = torch.where(among.count > 1, baseline, 0.0)
    return (scores - baseline[among.member])[:, None] * mask
