"""Policies that are as likely as rewards say: Zhang et al. 2025, arXiv:2504.19599, eq. 9 (GVPO), which is the
trajectory balance of Bartoldson et al. 2025, arXiv:2503.18929 (TBA), eq. 5."""

from __future__ import annotations

import torch

from penstock.services.trainer.algorithms.advantages.branches import beside, of_sessions
from penstock.services.trainer.algorithms.advantages.group_stats import Groups


def gvpo(
    tokens: torch.Tensor,
    mask: torch.Tensor,
    groups: torch.Tensor,
    reference: torch.Tensor,
    policy: torch.Tensor,
    scores: torch.Tensor,
    sessions: torch.Tensor,
    *,
    beta: float,
    per_token: bool,
) -> torch.Tensor:
    """With h(y) = Σ log π(y_t) − log π_ref(y_t), of ``policy`` and ``reference`` ``[rows, length]``, or the mean over
    y's tokens (``per_token``), and R(y) its ``scores`` ``[rows]``, the loss of a group is

        ½ Σ_y ((R(y) − R̄) − β (h(y) − h̄))²

    R̄ and h̄ being the group's means. It is 0 where π is π_ref exp(R / β), up to what makes it sum to 1, whoever has
    sampled. Divided by β its gradient is that of −Σ A log π(y_t), or of the mean over tokens, with
    A = (R − R̄) − β (h − h̄). ``sessions`` ``[rows]``: branches of one session, which are one answer. ``tokens`` has no
    part in it."""
    branches, of_session, whole = of_sessions(sessions, groups, scores.to(tokens.dtype))
    far = beside(reference, policy, mask, branches, tokens.dtype)
    if per_token:
        far = far / branches.sum(mask.to(tokens.dtype).sum(-1)).clamp(min=1)
    among = Groups.of(of_session, whole.dtype)
    worth = among.centred(whole - beta * far) * (among.count > 1)[among.member]
    return worth[branches.member, None] * mask
