"""Moments in 8 bits (torchao's `OptimState8bit`): as fp32 for a checkpoint, and back without a change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

TOGETHER = 1 << 14
"""Blocks that are worked on at once: each value takes 33 bytes meanwhile."""
NEIGHBOURS = 2
"""A scale that is computed from what it scaled is off by no more steps of fp32 than this."""


def is_quantized(tensor: torch.Tensor) -> bool:
    """It is a code of 8 bits for each value, and a scale for each block of them."""
    return hasattr(tensor, "codes") and hasattr(tensor, "qmap")


def in_fp32(tensor: Any) -> torch.Tensor:
    """What it stands for."""
    found = torch.empty(tensor.codes.shape, device=tensor.codes.device)
    every, codes = found.view(-1, tensor.block_size), tensor.codes.view(-1, tensor.block_size)
    for some in _slices(len(codes)):
        torch.mul(tensor.qmap[codes[some].int()], tensor.scale[some, None], out=every[some])
    return found


def quantize(values: torch.Tensor, into: Any) -> None:
    """``into`` becomes ``values``, fp32 of its shape. Where those are what `in_fp32` gave of blocks like these it
    stands for the same, bit by bit: torchao itself would take another scale for a block whose largest value is
    negative, since its codes reach -0.993 and 1."""
    blocks, codes = values.reshape(-1, into.block_size), into.codes.view(-1, into.block_size)
    for some in _slices(len(blocks)):
        codes[some], into.scale[some] = _quantized(blocks[some], into.qmap)


def _slices(blocks: int) -> Iterator[slice]:
    return (slice(first, first + TOGETHER) for first in range(0, blocks, TOGETHER))


def _quantized(blocks: torch.Tensor, qmap: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of ``blocks``."""
    lowest = qmap[0].double()
    scale = blocks.amax(1).double()
    if lowest:
        scale = torch.maximum(scale, blocks.amin(1).double() / lowest)
    first = scale.float().clip(1e-12)
    found = _codes(blocks, first, qmap)
    scale = first.clone()
    same = _stands_for(found, first, qmap, blocks)
    for steps in range(1, NEIGHBOURS + 1):
        for towards in (torch.inf, 0.0):
            other = first
            for _ in range(steps):
                other = torch.nextafter(other, torch.full_like(other, towards))
            better = ~same & _stands_for(found, other, qmap, blocks)
            scale[better] = other[better]
            same |= better
    return found, scale


def _codes(blocks: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor) -> torch.Tensor:
    """uint8 like ``blocks``: the nearest of ``qmap``, which rises."""
    scaled = (blocks / scale[:, None]).contiguous()
    above = torch.searchsorted(qmap, scaled).clip(1, len(qmap) - 1)
    nearer = scaled - qmap[above - 1] < qmap[above] - scaled
    return torch.where(nearer, above - 1, above).to(torch.uint8)


def _stands_for(codes: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Which of the blocks are exactly what their codes stand for: bool ``[blocks]``."""
    return (qmap[codes.int()] * scale[:, None] == blocks).all(1)
