"""ReMax (Li et al. 2023, arXiv:2310.10505, eq. 7)."""

from __future__ import annotations

import torch

from penstock.services.learning.token_returns import discounted


def remax(tokens: torch.Tensor, mask: torch.Tensor, groups: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
    """What is still to come at each token, less ``greedy`` ``[rows]``: the reward of the greedy answer to the row's
    prompt. ``tokens``, ``mask`` and the result are ``[rows, length]``."""
    return (discounted(tokens, mask, 1.0) - greedy[:, None].to(tokens.dtype)) * mask
