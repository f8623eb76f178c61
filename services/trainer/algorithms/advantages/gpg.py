"""Group policy gradient: Chu et al. 2025, arXiv:2504.02546."""

from __future__ import annotations

import torch

from penstock.services.trainer.algorithms.advantages.group_stats import Groups


def gpg(scores: torch.Tensor, mask: torch.Tensor, groups: torch.Tensor, f_norm: float = 1.0) -> torch.Tensor:
    """(reward - the group's mean) * rows / max(1, rows with a reward that is not 0) / ``f_norm``, the counts being over
    the step. Shapes as for `grpo`."""
    scale = len(scores) / scores.count_nonzero().clamp(min=1) / f_norm
    return (Groups.of(groups, scores.dtype).centred(scores) * scale)[:, None] * mask
