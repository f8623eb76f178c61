"""Single-stream policy optimization: Xu and Ding 2025, arXiv:2509.13232."""

from __future__ import annotations

import torch

EPSILON = 1e-6


def spo(scores: torch.Tensor, mask: torch.Tensor, groups: torch.Tensor, worth: torch.Tensor) -> torch.Tensor:
    """Each row's reward ``[rows]``, less what its prompt was ``worth`` before, ``[rows]``; less the mean of that over
    all rows, and over its deviation. The result and ``mask`` are ``[rows, length]``; ``groups`` play no part."""
    apart = scores - worth.to(scores.dtype)
    return ((apart - apart.mean()) / (apart.std(correction=0) + EPSILON))[:, None] * mask
