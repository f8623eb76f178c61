"""Group-relative advantages: Shao et al. 2024, arXiv:2402.03300; without the standard deviation Liu et al. 2025,
arXiv:2503.20783; with the step's, Lite PPO's: Liu et al. 2025, arXiv:2508.08221; beside the others alone: the mean is
that of Ahmadian et al. 2024, arXiv:2402.14740."""

from __future__ import annotations

from typing import Literal

import torch

from penstock.services.trainer.algorithms.advantages.group_stats import Groups


def grpo(
    scores: torch.Tensor,
    mask: torch.Tensor,
    groups: torch.Tensor,
    std: bool | Literal["step"] = True,
    leave_one_out: bool = False,
) -> torch.Tensor:
    """Each row's reward, less its group's mean, divided by (the group's unbiased standard deviation + 1e-6); with
    ``std="step"`` by (that of all ``scores`` + 1e-6). With ``leave_one_out`` mean and deviation are those of the
    group's others, as `Groups.beside_others` has them.

    ``scores`` ``[rows]``: the whole reward of each row; ``mask`` ``[rows, length]``: 1 for sampled tokens; ``groups``
    ``[rows]``: any integer that is the same within a group. Returns ``[rows, length]``: the row's advantage on valid
    tokens, 0 elsewhere. A group of one has mean 0 and standard deviation 1.
    """
    among = Groups.of(groups, scores.dtype)
    own = std is True
    found = among.beside_others(scores, own) if leave_one_out else among.compared(scores, own)
    if std == "step":
        found = found / ((scores.std() if len(scores) > 1 else 1.0) + 1e-6)
    return found[:, None] * mask
