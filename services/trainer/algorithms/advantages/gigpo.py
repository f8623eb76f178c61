"""Group-in-group advantages, for tasks of several turns: Feng et al. 2025, arXiv:2505.10978."""

from __future__ import annotations

import torch

from penstock.services.trainer.algorithms.advantages.branches import of_sessions
from penstock.services.trainer.algorithms.advantages.group_stats import Groups


def gigpo(
    tokens: torch.Tensor,
    mask: torch.Tensor,
    groups: torch.Tensor,
    states: torch.Tensor,
    scores: torch.Tensor,
    sessions: torch.Tensor,
    *,
    gamma: float = 0.95,
    turn_weight: float = 1.0,
    std: bool = True,
) -> torch.Tensor:
    """A row's whole reward beside its group's, plus ``turn_weight`` times its turn's return beside those of its group's
    turns that were written in the same state (eq. 3, 5, 7 and 8); ``[rows, length]``, 0 where ``mask`` is.

    ``tokens`` ``[rows, length]`` says where the rewards lie, ``mask`` where a token was sampled, ``groups`` ``[rows]``
    which rows belong together, ``states`` int64 ``[rows, length]`` in which state each sampled token's turn began,
    ``scores`` ``[rows]`` the whole rewards, ``sessions`` ``[rows]`` which rows are branches of one session: that is
    compared once, by the mean of its branches, each of whose turns is sampled in one of them alone. A turn is a run of
    sampled tokens; its return adds the later turns', discounted by ``gamma`` a turn. Both parts are less the mean, and
    with ``std`` divided by (the unbiased standard deviation + 1e-6); a turn that is alone in its state adds nothing."""
    here = mask.bool()
    branches, of_session, whole = of_sessions(sessions, groups, scores)
    episodes = Groups.of(of_session, tokens.dtype)
    found = episodes.compared(whole, std)[branches.member, None] * mask
    before = torch.cat([torch.zeros_like(here[:, :1]), here[:, :-1]], 1)
    begins = here & ~before
    turns = int(begins.sum(-1).max()) if begins.numel() else 0
    if not turns:
        return found
    turn = begins.long().cumsum(-1) - 1
    cell = (torch.arange(len(tokens))[:, None] * turns + turn)[here]  # of each sampled token: its row's turn
    returns = torch.zeros(len(tokens) * turns, dtype=tokens.dtype).index_add_(0, cell, tokens[here]).view(-1, turns)
    for late in reversed(range(turns - 1)):
        returns[:, late] += gamma * returns[:, late + 1]
    first = torch.nonzero(begins)
    mine = turn[begins]
    anchors = torch.stack([groups[first[:, 0]], states[begins]], 1)
    among = Groups.of(torch.unique(anchors, dim=0, return_inverse=True)[1], tokens.dtype)
    relative = among.compared(returns[first[:, 0], mine], std)
    relative = torch.where(among.count[among.member] > 1, relative, 0.0)
    by_turn = torch.zeros_like(returns)
    by_turn[first[:, 0], mine] = relative
    found[here] += turn_weight * by_turn.flatten()[cell]
    return found
