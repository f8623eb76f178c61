"""Feed-forward parts that compute some tokens at a time: what they have between their matrices, several times as wide
as a hidden state, is there of those tokens alone, and is computed again in the backward (the tiled computation of
Arctic Long Sequence Training, Bekman et al. 2025, arXiv:2506.13996)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from penstock.services.modeling.parallel.stages import held_layers
from penstock.services.modeling.towers import decoder_of
from penstock.services.runtime.errors import SetupError

PLAIN = ("mlp", "feed_forward", "shared_mlp", "shared_expert", "shared_experts")
"""What transformers calls them."""
DEALT = ("experts", "router", "gate")
"""Children of what deals tokens out to experts: these have as many tokens as come."""


def tile_mlps(model: Any, tokens: int, key: str) -> None:
    """Has each feed-forward part of the decoder's layers compute ``tokens`` tokens at a time, but for experts. Raises
    `SetupError`, by the config's ``key``, where the model has none."""
    layers = held_layers(model) if hasattr(decoder_of(model), "layers") else []
    found = [mlp for layer in layers for mlp in _plain(layer)]
    if not found and not hasattr(model, "penstock_stage"):  # a stage may have experts alone
        raise SetupError(
            f"{key}: {model.config.get_text_config().model_type} has no feed-forward part that computes every token "
            "alike; leave it out"
        )
    for mlp in found:
        mlp.forward = _tiled(mlp, mlp.forward, tokens)


def _plain(module: nn.Module) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        if name not in PLAIN:
            continue
        if any(hasattr(child, dealt) for dealt in DEALT):
            yield from _plain(child)
        else:
            yield child


def _tiled(mlp: nn.Module, compute: Callable[[torch.Tensor], torch.Tensor], tokens: int) -> Callable[..., Any]:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.flatten(0, -2)
        if len(flat) <= tokens:
            return compute(hidden)
        found: torch.Tensor = _Tiles.apply(mlp, compute, tokens, flat, *_learned(mlp))
        return found.view(*hidden.shape[:-1], -1)

    return forward


def _learned(mlp: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in mlp.parameters() if parameter.requires_grad]


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, mlp: nn.Module, compute: Callable[[torch.Tensor], torch.Tensor], tokens: int,
        hidden: torch.Tensor, *learned: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        context.mlp, context.compute, context.tokens = mlp, compute, tokens
        context.save_for_backward(hidden)  # parameters would keep what FSDP has gathered
        return torch.cat([compute(part) for part in hidden.split(tokens)])

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (hidden,), (gradient,) = context.saved_tensors, gradients
        learned = _learned(context.mlp)
        sums: list[torch.Tensor] = []
        back = torch.empty_like(hidden) if context.needs_input_grad[3] else None
        for first in range(0, len(hidden), context.tokens):
            rows = slice(first, first + context.tokens)
            part = hidden[rows].detach().requires_grad_(back is not None)
            with torch.enable_grad():
                found = context.compute(part)
            wanted = [*([part] if back is not None else []), *learned]
            every = list(torch.autograd.grad(found, wanted, gradient[rows]))
            if back is not None:
                back[rows] = every.pop(0)
            if sums:
                for total, one in zip(sums, every, strict=True):
                    total += one
            else:
                sums = [one.float() for one in every]  # as one product would sum them, whatever it rounds to
        return None, None, None, back, *(s.to(p.dtype) for s, p in zip(sums, learned, strict=True))
