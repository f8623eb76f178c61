"""The clipped value loss: Schulman et al. 2017, arXiv:1707.06347; Huang et al. 2022, "37 implementation details"."""

from __future__ import annotations

import torch


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token losses ½ max((v - R)², (v kept within ``clip`` of the old value - R)²), and where (bool) the second is
    larger; all of one shape."""
    kept = values.clamp(old_values - clip, old_values + clip)
    plain, clipped = (values - returns).square(), (kept - returns).square()
    return torch.maximum(plain, clipped) / 2, clipped > plain
