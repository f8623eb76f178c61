"""Rewards on tokens: where they lie, what is still to come at each, and how that is spread over a step."""

from __future__ import annotations

import torch


def on_last_token(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``scores`` ``[rows]`` on each row's last valid token; ``[rows, length]``. A row without one has none."""
    places = torch.arange(mask.shape[1], device=mask.device) * mask
    rewards = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    rewards[torch.arange(len(scores)), places.argmax(-1)] = scores
    return rewards * mask


def discounted(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Sums of ``rewards`` from each valid token to the row's end, discounted by ``gamma`` a valid token: other tokens
    neither add nor discount. ``[rows, length]``, 0 where ``mask`` is."""
    if gamma == 1 and rewards.device.type == "cpu":  # elsewhere its order is not fixed
        valid = mask.bool()
        return torch.where(valid, torch.where(valid, rewards, 0.0).flip(1).cumsum(1).flip(1), 0.0)
    return gae(rewards, torch.zeros_like(rewards), mask, gamma)[0]


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float = 1.0,
    lam: float | torch.Tensor = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimates (Schulman et al. 2015, arXiv:1506.02438, eq. 16), and returns: estimates plus
    ``values``. All ``[rows, length]``, 0 where ``mask`` is. The recursion goes from one valid token to the next: what
    lies between, an environment's answer say, neither adds nor discounts. The value after the last is 0. ``lam`` is one
    for all, or one of each row, ``[rows]``."""
    estimates = torch.zeros_like(rewards)
    running, following = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for place in reversed(range(rewards.shape[1])):
        valid = mask[:, place].bool()
        error = rewards[:, place] + gamma * following - values[:, place]
        running = torch.where(valid, error + gamma * lam * running, running)
        following = torch.where(valid, values[:, place], following)
        estimates[:, place] = torch.where(valid, running, 0.0)
    return estimates, (estimates + values) * mask


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``values`` less their mean over all valid tokens, divided by the root of (their unbiased variance + 1e-8); 0
    where ``mask`` is."""
    count = mask.sum()
    mean = (values * mask).sum() / count.clamp(min=1)
    centred = (values - mean) * mask
    return centred / (centred.square().sum() / (count - 1).clamp(min=1) + 1e-8).sqrt()
