"""Group policy gradient: Chu et al. 2025, arXiv:2504.02546."""

from __future__ import annotations

import torch

from penstock.services.trainer.algorithms.advantages.group_stats import Groups

EQUAL = 1e-6
"""Rewards of a group that differ by less, of the step's largest, are equal."""


def gpg(scores: torch.Tensor, mask: torch.Tensor, groups: torch.Tensor, f_norm: float = 1.0) -> torch.Tensor:
    """(reward - the group's mean) * α / ``f_norm``, where α is rows / rows of groups whose rewards are not all equal,
    up to rounding. The counts are over the step. Shapes as for `grpo`."""
    among = Groups.of(groups, scores.dtype)
    centred = among.centred(scores)
    unlike = centred.abs() > EQUAL * scores.abs().max().clamp(min=1)
    teaching = (among.sum(unlike.to(scores.dtype)) > 0)[among.member].sum()
    return (centred * (len(scores) / teaching.clamp(min=1)) / f_norm)[:, None] * mask
