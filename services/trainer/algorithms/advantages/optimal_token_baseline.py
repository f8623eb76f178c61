"""The baseline of least variance, token by token: cf. Greensmith et al. 2004, JMLR 5, section 4."""

from __future__ import annotations

import torch

from penstock.services.learning.token_returns import discounted
from penstock.services.trainer.algorithms.advantages.group_stats import Groups


def optimal_token_baseline(
    tokens: torch.Tensor,
    mask: torch.Tensor,
    groups: torch.Tensor,
    log_prob: torch.Tensor,
    squares: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    zero_tail: bool = True,
) -> torch.Tensor:
    """The return of each token, less the group's baseline at that step; ``[rows, length]``.

    ``log_prob`` and ``squares`` ``[rows, length]`` are the policy's: of each token, and the sum of all squared
    probabilities where it was chosen. A token's energy, the expected squared length of its gradient in the logits, is
    1 - 2 p + squares, times ``weights`` squared; W is its sum up to the step. The baseline at a row's n-th sampled
    token is Σ W·return / (Σ W + 1e-8) over the group's rows that have an n-th: what an environment says between two
    turns shifts nothing. A group of one has none. ``zero_tail``: where one row alone goes on, neither has it."""
    returns = discounted(tokens, mask, 1.0)
    energy = (1 - 2 * log_prob.to(tokens.dtype).exp() + squares.to(tokens.dtype)) * mask
    if weights is not None:
        energy = energy * weights.to(tokens.dtype).square()
    among, steps = Groups.of(groups, tokens.dtype), mask.long().cumsum(-1) - 1
    here = mask.bool()
    cell = (among.member[:, None] * mask.shape[1] + steps)[here]
    weight = energy.cumsum(-1)[here]

    def at(values: torch.Tensor) -> torch.Tensor:
        """Sums over the group's rows that have this step, for each sampled token."""
        return torch.zeros(len(among.count) * mask.shape[1], dtype=tokens.dtype).index_add_(0, cell, values)[cell]

    baseline = at(weight * returns[here]) / (at(weight) + 1e-8)
    alone = (among.count[among.member] < 2)[:, None].expand(mask.shape)[here]
    if zero_tail:
        alone = alone | (at(torch.ones_like(weight)) < 2)
    found = torch.zeros_like(returns)
    found[here] = returns[here] - torch.where(alone, 0.0, baseline)
    return found
