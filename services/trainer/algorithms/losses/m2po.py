"""Second-moment trust policy optimization: Zheng et al. 2025, arXiv:2510.01161."""

from __future__ import annotations

import torch

from penstock.services.learning.masked_mean import masked_mean
from penstock.services.trainer.algorithms.losses.ratio import clamped_log_ratio, share, weighted


def pick(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    generator: torch.Generator,
    second_moment: float,
) -> torch.Tensor:
    """bool ``[rows, length]``: of the tokens of a whole update those that lose their loss. Only those can that have
    gone the way that their advantage pulls (A > 0 and r > 1, or A < 0 and r < 1: where PPO would clip, section 5.2): of
    these as few as leave the others of them with a mean squared log-ratio of at most ``second_moment``, those whose own
    is largest."""
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    gone = mask.bool() & (log_ratio * advantages > 0)
    squares = log_ratio.square().double()[gone]
    ranked, order = squares.sort()
    fits = ranked.cumsum(0) / torch.arange(1, len(ranked) + 1) <= second_moment  # means of what is sorted only rise
    valid = torch.zeros(len(ranked), dtype=torch.bool)
    valid[order[int(fits.sum()) :]] = True
    picked = torch.zeros(mask.shape, dtype=torch.bool)
    picked[gone] = valid
    return picked


def m2po(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_weights: torch.Tensor | None,
    picked: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token losses -A r, 0 where ``picked`` is 1, times the importance weights; ``[rows, length]``."""
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    metrics = {
        "dropped_fraction": share(picked > 0, mask),
        "approx_kl": masked_mean(-log_ratio.detach(), mask),
    }
    return weighted(-advantages * log_ratio.exp() * (1 - picked), importance_weights), metrics
