"""A model's head, hidden states to logits, in fp32 where the rest of the model computes in 16 bits.

In bf16 a logit of 20 is known to 1/16 at best, and engine and trainer round it differently: MiniMax-M1 (MiniMax 2025,
arXiv:2506.13585) found the main source of their difference there, and ScaleRL (Khatri et al. 2025, arXiv:2510.13786)
computes it so, too. What is cast is what is computed with: weights, gathers and versions are as ever.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from penstock.services.modeling.load import ModelError


def compute_head_in(model: Any, dtype: str | None) -> None:
    """From now on the head of ``model``, of transformers, gives logits in ``dtype``, "float32"; None: in its own.
    What its family does with them (a soft cap, a scale) comes after, in that dtype too. Where an adapter changes the
    head, its part is computed alike. Of a pipeline only the last stage has a head. Raises `ModelError`."""
    stage = getattr(model, "penstock_stage", None)
    if dtype is None or (stage and not stage.last):
        return
    head = model.get_output_embeddings()
    within = () if head is None else head.modules()
    linear = [module for module in within if type(module) in (nn.Linear, Float32Linear)]
    if not linear:
        raise ModelError(
            f"model.head_dtype: the head of {model.config.model_type} is no linear layer that is known here; set it to "
            "null"
        )
    for module in linear:
        module.__class__ = Float32Linear


class Float32Linear(nn.Linear):
    """A linear layer whose weights, of any dtype, meet its inputs in fp32."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `linear`."""
        return linear(inputs, self.weight, self.bias)


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """float32(inputs) · float32(weight)ᵀ (+ float32(bias)): float32 ``[…, outputs]`` of ``inputs`` ``[…, inputs]`` and
    ``weight`` ``[outputs, inputs]``; of float32 what `torch.nn.functional.linear` gives, bit by bit. Differentiable:
    each gradient in the dtype of what it is of."""
    if inputs.dtype == weight.dtype == torch.float32:
        return F.linear(inputs, weight, bias)
    product: torch.Tensor = _Linear.apply(inputs.reshape(-1, inputs.shape[-1]), weight)
    product = product.view(*inputs.shape[:-1], weight.shape[0])
    return product if bias is None else product + bias.float()


class _Linear(torch.autograd.Function):
    """Keeps what it is given for its backward, and no fp32 copy of it, however many chunks of tokens there are."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return _product(inputs, weight.T)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        (gradient,), multiply = gradients, _product
        if _widens(inputs, weight):
            # Rounded as it is without this head, and summed in fp32 within a product.
            gradient, multiply = gradient.to(weight.dtype), torch.mm
        of_inputs = multiply(gradient, weight).to(inputs.dtype) if ctx.needs_input_grad[0] else None
        of_weight = multiply(gradient.T, inputs).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return of_inputs, of_weight


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """float32 ``[n, m]`` of ``[n, k]`` and ``[k, m]``, each in its own dtype."""
    if _widens(left, right):
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _widens(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Their device makes fp32 of 16 bits as it multiplies, without a copy of either."""
    return left.is_cuda and left.dtype == right.dtype and left.itemsize == 2
