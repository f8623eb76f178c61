"""Several rewards, each normalised by itself: GDPO 2026, arXiv:2601.05242."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.services.learning.token_returns import whiten
from penstock.services.trainer.algorithms.advantages.group_stats import Groups


def gdpo(
    scores: torch.Tensor,
    mask: torch.Tensor,
    groups: torch.Tensor,
    *components: torch.Tensor,
    weights: Sequence[float] = (),
) -> torch.Tensor:
    """Each of ``components`` ``[rows]`` is standardised within its group as by `grpo`; their sum with ``weights`` lies
    on the row's valid tokens and is whitened over all of the step's. ``scores`` has no part in it. Shapes as for
    `grpo`."""
    among = Groups.of(groups, scores.dtype)
    total = torch.zeros_like(scores)
    for weight, component in zip(weights, components, strict=True):
        total = total + weight * among.standardised(component.to(scores.dtype))
    return whiten(total[:, None] * mask, mask)
