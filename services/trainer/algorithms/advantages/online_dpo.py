"""Preferences between answers of a group: Guo et al. 2024, arXiv:2402.04792 (online DPO); Rafailov et al. 2023,
arXiv:2305.18290, eq. 7 (``sigmoid``); Azar et al. 2023, arXiv:2310.12036, eq. 17 (``ipo``)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from penstock.services.trainer.algorithms.advantages.branches import beside, of_sessions
from penstock.services.trainer.algorithms.advantages.group_stats import Groups


def online_dpo(
    tokens: torch.Tensor,
    mask: torch.Tensor,
    groups: torch.Tensor,
    reference: torch.Tensor,
    policy: torch.Tensor,
    scores: torch.Tensor,
    sessions: torch.Tensor,
    *,
    beta: float,
    shape: Literal["sigmoid", "ipo"],
) -> torch.Tensor:
    """Of each group the best answer y⁺ and the worst y⁻, by their ``scores`` ``[rows]``, are a pair; where several are
    as good, or as bad, all pairs of them. With h(y) = Σ log π(y_t) − log π_ref(y_t), of ``policy`` and ``reference``
    ``[rows, length]``, and Δ = h(y⁺) − h(y⁻), the pair's loss is

        sigmoid: −log σ(β Δ)        ipo: (Δ − 1 / 2β)²

    whose gradient is that of −Σ A log π(y_t) with A = β σ(−β Δ), or 2 (1 / 2β − Δ), for y⁺, and minus that for y⁻. A
    is times the group's answers, so that a mean over all answers is the mean over groups. 0 where all are equally
    good. ``sessions`` ``[rows]``: branches of one session, which are one answer. ``tokens`` has no part in it."""
    branches, pairs = _pairs(mask, groups, reference, policy, scores.to(tokens.dtype), sessions)
    worth = torch.zeros_like(branches.count)
    for pair in pairs:
        apart = pair.apart
        pull = beta * torch.sigmoid(-beta * apart) if shape == "sigmoid" else 2 * (1 / (2 * beta) - apart)
        pull = pull * pair.answers / pull.numel()
        worth[pair.best], worth[pair.worst] = pull.sum(1), -pull.sum(0)
    return worth[branches.member, None] * mask


def pair_loss(apart: torch.Tensor, beta: float, shape: Literal["sigmoid", "ipo"]) -> torch.Tensor:
    """Of each pair the loss that `online_dpo` has the gradient of, by its Δ, ``apart``, of any shape; in nats for
    ``sigmoid``."""
    return torch.nn.functional.softplus(-beta * apart) if shape == "sigmoid" else (apart - 1 / (2 * beta)).square()


def agreement(apart: torch.Tensor) -> dict[str, float]:
    """Of pairs with these Δ, ``apart`` ``[pairs]``: ``preferred_likelier``, the share whose Δ is above 0, and
    ``preferred_margin``, the mean of Δ, in nats."""
    return {"preferred_likelier": float((apart > 0).double().mean()), "preferred_margin": float(apart.mean())}


class _Pairs(NamedTuple):
    """Of one group."""

    answers: int
    best: torch.Tensor
    worst: torch.Tensor
    apart: torch.Tensor
    """``[best, worst]``: Δ."""


def _pairs(
    mask: torch.Tensor,
    groups: torch.Tensor,
    reference: torch.Tensor,
    policy: torch.Tensor,
    scores: torch.Tensor,
    sessions: torch.Tensor,
) -> tuple[Groups, list[_Pairs]]:
    """Rows by session, and the pairs of each group that has some, by the arguments of `online_dpo`, in the dtype of
    ``scores``."""
    branches, of_session, whole = of_sessions(sessions, groups, scores)
    margins, found = beside(reference, policy, mask, branches, scores.dtype), list[_Pairs]()
    for number in torch.unique(of_session):
        mine = torch.nonzero(of_session == number)[:, 0]
        best, worst = (mine[whole[mine] == end] for end in (whole[mine].max(), whole[mine].min()))
        if whole[best[0]] != whole[worst[0]]:
            found.append(_Pairs(len(mine), best, worst, margins[best][:, None] - margins[worst][None]))
    return branches, found


def preferred(
    mask: torch.Tensor,
    groups: torch.Tensor,
    reference: torch.Tensor,
    policy: torch.Tensor,
    scores: torch.Tensor,
    sessions: torch.Tensor,
) -> dict[str, float]:
    """`agreement` on the pairs of `online_dpo`, by its arguments. Empty where there is no pair."""
    apart = [pair.apart.flatten() for pair in _pairs(mask, groups, reference, policy, scores, sessions)[1]]
    return agreement(torch.cat(apart)) if apart else {}
