"""A penalty in the reward for leaving the reference: Ouyang et al. 2022, arXiv:2203.02155; its adaptive coefficient:
Ziegler et al. 2019, arXiv:1909.08593."""

from __future__ import annotations

import torch

from penstock.services.learning.kl_penalty import kl_penalty

LARGEST_ERROR = 0.2
"""Of the divergence from its target: what is beyond changes the coefficient no faster."""


def kl_in_reward(
    log_prob: torch.Tensor, ref_log_prob: torch.Tensor, mask: torch.Tensor, kind: str
) -> tuple[torch.Tensor, float]:
    """The divergence of each token, ``[rows, length]``, 0 where ``mask`` is; and the mean over rows of each row's mean
    over its valid tokens."""
    kl = kl_penalty(log_prob, ref_log_prob, kind) * mask
    counts = mask.sum(-1)
    means = kl.sum(-1)[counts > 0] / counts[counts > 0]
    return kl, float(means.mean()) if means.numel() else 0.0


def adapted(coefficient: float, kl: float, target: float, horizon: float, rows: int) -> float:
    """The next coefficient, after ``rows`` trajectories with a mean divergence of ``kl``: it grows where that is above
    ``target``, by at most `LARGEST_ERROR` in ``horizon`` trajectories, and by so much again in as many more."""
    error = min(max(kl / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    times, left = divmod(rows, horizon)
    return coefficient * (1 + error) ** times * (1 + error * left / horizon)
