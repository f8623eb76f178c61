"""Means over valid tokens."""

import torch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to plus or minus this before they are exponentiated."""


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of ``values`` where ``mask`` is 1 (both ``[rows, length]``); 0 where no token is valid."""
    return (values * mask).sum() / (mask.sum() + 1e-8)
