"""Moments in 8 bits (torchao's `OptimState8bit`): as fp32 for a checkpoint, and back without a change."""

from __future__ import annotations

from typing import Any

import torch

NEIGHBOURS = 2
"""A scale that is computed from what it scaled is off by no more steps of fp32 than this."""


def is_quantized(tensor: torch.Tensor) -> bool:
    """It is a code of 8 bits for each value, and a scale for each block of them."""
    return hasattr(tensor, "codes") and hasattr(tensor, "qmap")


def in_fp32(tensor: Any) -> torch.Tensor:
    """What it stands for."""
    found: torch.Tensor = tensor.dequantize()
    return found


def quantize(values: torch.Tensor, into: Any) -> None:
    """``into`` becomes ``values``, fp32 of its shape. Where those are what `in_fp32` gave of blocks like these it
    stands for the same, bit by bit: torchao itself would take another scale for a block whose largest value is
    negative, since its codes reach -0.993 and 1."""
    blocks, lowest = values.reshape(-1, into.block_size), into.qmap[0].double()
    scale = blocks.amax(1).double()
    if lowest:
        scale = torch.maximum(scale, blocks.amin(1).double() / lowest)
    first = scale.float().clip(1e-12)
    found = _codes(blocks, first, into.qmap)
    scale = first.clone()
    same = _stands_for(found, first, into.qmap, blocks)
    for steps in range(1, NEIGHBOURS + 1):
        for towards in (torch.inf, 0.0):
            other = first
            for _ in range(steps):
                other = torch.nextafter(other, torch.full_like(other, towards))
            better = ~same & _stands_for(found, other, into.qmap, blocks)
            scale[better] = other[better]
            same |= better
    into.codes.copy_(found.view(into.codes.shape))
    into.scale.copy_(scale)


def _codes(blocks: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor) -> torch.Tensor:
    """uint8 like ``blocks``: the nearest of ``qmap``, which rises."""
    scaled = (blocks / scale[:, None]).contiguous()
    above = torch.searchsorted(qmap, scaled).clip(1, len(qmap) - 1)
    nearer = scaled - qmap[above - 1] < qmap[above] - scaled
    return torch.where(nearer, above - 1, above).to(torch.uint8)


def _stands_for(codes: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Which of the blocks are exactly what their codes stand for: bool ``[blocks]``."""
    return (qmap[codes.int()] * scale[:, None] == blocks).all(1)
