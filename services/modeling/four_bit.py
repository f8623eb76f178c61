"""Linear layers whose matrix lies in 4 bits: NF4 in blocks of 64 numbers, whose scales lie in 8 (Dettmers et al. 2023,
QLoRA, arXiv:2305.14314, sections 3 and 4). bitsandbytes makes and reads the codes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

BLOCK, SCALES = 64, 256
"""Numbers that share a scale, and scales that share one of theirs."""


logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # as peft imports it, it advises kernels that nobody needs


class FourBitLinear(nn.Module):
    """In the place of a `torch.nn.Linear` whose matrix is not trained. The matrix is whole on every rank; each time it
    is multiplied with, forward and backward, it is made anew in ``linear``'s dtype, and not kept."""

    codes: torch.Tensor
    scales: torch.Tensor
    offset: torch.Tensor
    scales_scales: torch.Tensor
    scales_codes: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight
        self.shape, self.dtype, self.bias = weight.shape, weight.dtype, linear.bias
        blocks = -(-weight.numel() // BLOCK)
        sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "codes": ((blocks * BLOCK // 2, 1), torch.uint8),
            "scales": ((blocks,), torch.uint8),
            "offset": ((), torch.float32),
            "scales_scales": ((-(-blocks // SCALES),), torch.float32),
            "scales_codes": ((256,), torch.float32),
        }
        for name, (shape, dtype) in sizes.items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device=weight.device), persistent=False)
        if not weight.is_meta:
            self.take(weight)

    @torch.no_grad()
    def take(self, matrix: torch.Tensor) -> None:
        """``matrix`` ``[outputs, inputs]``, of any device, is its own from now on."""
        from bitsandbytes.functional import quantize_4bit

        mine = matrix.detach().to(self.codes.device, self.dtype).flatten()
        # A block a row: bitsandbytes' kernel for CPUs takes wrong scales where rows end within blocks.
        rows = functional.pad(mine, (0, -len(mine) % BLOCK)).view(-1, BLOCK)
        codes, state = quantize_4bit(rows, blocksize=BLOCK, quant_type="nf4", compress_statistics=True)
        self.codes.copy_(codes)
        self.scales.copy_(state.absmax)
        self.offset.copy_(state.offset)
        self.scales_scales.copy_(state.state2.absmax)
        self.scales_codes.copy_(state.state2.code)

    @torch.no_grad()
    def matrix(self) -> torch.Tensor:
        """``[outputs, inputs]``."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        scales = QuantState(self.scales_scales, code=self.scales_codes, blocksize=SCALES, dtype=torch.float32)
        state = QuantState(
            self.scales, torch.Size((len(self.scales), BLOCK)), blocksize=BLOCK, quant_type="nf4", dtype=self.dtype,
            offset=self.offset, state2=scales,
        )  # fmt: skip
        found: torch.Tensor = dequantize_4bit(self.codes, state)
        return found.flatten()[: self.shape.numel()].view(self.shape)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., inputs]`` to ``[..., outputs]``."""
        found: torch.Tensor = _Product.apply(inputs, self)
        return found


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, layer: FourBitLinear) -> torch.Tensor:
        ctx.layer = layer
        return functional.linear(inputs, layer.matrix(), layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] @ ctx.layer.matrix(), None


def in_four_bits(model: nn.Module, names: Iterable[str]) -> None:
    """The linear layers of ``model`` that are called so lie in 4 bits from now on, on their device."""
    for name in names:
        above, _, last = name.rpartition(".")
        parent = model.get_submodule(above)
        setattr(parent, last, FourBitLinear(parent.get_submodule(last)))


def in_four_bits_by(model: nn.Module, names: Iterable[str], device: torch.device) -> None:
    """The linear layers of ``model``, on the host, that are called so lie there in 4 bits, which ``device`` makes."""
    for name in names:  # one by one: there may be no room for all of them whole
        model.get_submodule(name).to(device)
        in_four_bits(model, [name])
        model.get_submodule(name).to("cpu")


def rounded(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` as it is once it was in 4 bits; on its device, in its dtype."""
    linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(matrix, requires_grad=False)
    return FourBitLinear(linear).matrix()
