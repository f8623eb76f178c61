"""PRIME: Cui et al. 2025, arXiv:2502.01456, eq. 5."""

from __future__ import annotations

import torch

from penstock.services.learning.token_returns import discounted
from penstock.services.trainer.algorithms.advantages.branches import of_sessions
from penstock.services.trainer.algorithms.advantages.group_stats import Groups


def prime(
    tokens: torch.Tensor,
    mask: torch.Tensor,
    groups: torch.Tensor,
    process: torch.Tensor,
    scores: torch.Tensor,
    sessions: torch.Tensor,
    *,
    share: float,
    gamma: float,
) -> torch.Tensor:
    """The outcome, ``scores`` ``[rows]``, less the mean of the group's others, on each token; and ``share`` times what
    is still to come in the row of the ``process`` rewards ``[rows, length]``, each less the mean of what the group's
    others have a token, discounted by ``gamma``. Of a group of one nothing is taken off. ``sessions`` ``[rows]``:
    branches of one session, which is compared once, by the mean of their scores and by all of their tokens. ``tokens``
    has no part in it."""
    process = process.to(tokens.dtype) * mask
    branches, of_session, whole = of_sessions(sessions, groups, scores.to(tokens.dtype))
    among = Groups.of(of_session, tokens.dtype)
    outcome = among.beside_others(whole, std=False)
    each = branches.sum(process.sum(-1)) / branches.sum(mask.sum(-1)).clamp(min=1)
    others = each - among.beside_others(each, std=False)
    to_come = discounted((process - others[branches.member, None]) * mask, mask, gamma)
    return outcome[branches.member, None] * mask + share * to_come
