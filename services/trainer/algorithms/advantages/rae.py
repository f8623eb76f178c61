"""Role-conditioned advantage estimation, for self-play: Liu et al. 2025, arXiv:2506.24119."""

from __future__ import annotations

import torch


def rae(scores: torch.Tensor, mask: torch.Tensor, groups: torch.Tensor, *told: torch.Tensor) -> torch.Tensor:
    """Each row's reward ``[rows]``, less the running baseline of its role: the last of ``told``, ``[rows]``, behind the
    column of which it follows. The result and ``mask`` are ``[rows, length]``; ``groups`` play no part."""
    return (scores - told[-1].to(scores.dtype))[:, None] * mask
