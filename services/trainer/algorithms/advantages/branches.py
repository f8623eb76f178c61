"""Advantages where an agent's session has several branches: it is compared with others once, however many it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from penstock.services.trainer.algorithms.advantages.group_stats import Groups

Advantage = Callable[[Mapping[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def by_session(
    advantage: Advantage,
    columns: Mapping[str, torch.Tensor],
    scores: torch.Tensor,
    mask: torch.Tensor,
    groups: torch.Tensor,
    sessions: torch.Tensor,
) -> torch.Tensor:
    """``advantage`` of whole rows, taken of each session: of the mean of its branches' ``scores`` (and ``columns``
    ``[rows]``), and of all of their tokens. Each branch has its session's. ``sessions`` ``[rows]``: any integer that is
    the same within a session; the other shapes as for `grpo`.

    >>> scores, groups = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([7, 7, 7])
    >>> two = by_session(lambda _, s, m, g: (s - s.mean())[:, None] * m, {}, scores, torch.ones(3, 1), groups,
    ...     torch.tensor([0, 1, 1]))
    >>> two[:, 0].tolist()
    [-0.5, 0.5, 0.5]
    """
    among = Groups.of(sessions, scores.dtype)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return among.sum(values.to(scores.dtype)) / among.count

    lengths = among.sum(mask.sum(-1)).clamp(min=1)
    places = torch.arange(int(lengths.max()), device=mask.device)
    whole = (places < lengths[:, None]).to(mask.dtype)
    of_rows = {name: mean(values) for name, values in columns.items() if values.ndim == 1}
    found = advantage(of_rows, mean(scores), whole, groups[among.one_of_each()])
    return found[among.member, :1] * mask


def beside(
    reference: torch.Tensor, policy: torch.Tensor, mask: torch.Tensor, branches: Groups, dtype: torch.dtype
) -> torch.Tensor:
    """``[sessions]``: how much likelier the policy finds all that a session has sampled than the reference does, by
    their log-probabilities ``[rows, length]``, computed in ``dtype``."""
    return branches.sum(((policy - reference).to(dtype) * mask).sum(-1))


def of_sessions(
    sessions: torch.Tensor, groups: torch.Tensor, scores: torch.Tensor
) -> tuple[Groups, torch.Tensor, torch.Tensor]:
    """Rows by session; and of each session the number of its group, and the mean of its branches' ``scores``."""
    branches = Groups.of(sessions, scores.dtype)
    return branches, groups[branches.one_of_each()], branches.sum(scores) / branches.count
