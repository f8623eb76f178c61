"""The experts of a mixture: one tensor for all of a layer's, as transformers computes with them and versions have them;
or matrices of each expert, as files have them and engines read them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from penstock.services.modeling.families import IN_MATRICES, TURNED

EXPERTS = ("gate_up_proj", "down_proj")
"""Parameters ``[experts, ...]`` of a layer's experts."""
_STACKED = re.compile(rf"(.*\.experts)\.({'|'.join(EXPERTS)})")
_SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(?:gate|up|down)_proj\.weight")


def mixture_layers(config: Any) -> list[int]:
    """Which layers of a model of this transformers ``config`` have experts; the others are plain."""
    if kinds := getattr(config, "mlp_layer_types", None):
        return [layer for layer, kind in enumerate(kinds) if kind == "sparse"]
    every, plain = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", None) or ()
    layers = range(getattr(config, "first_k_dense_replace", 0), config.num_hidden_layers)
    return [layer for layer in layers if layer not in plain and (layer + 1) % every == 0]


def experts_of(config: Any) -> int:
    """How many experts a layer has in a model of this transformers ``config``; 0: it is no mixture."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((found for name in names if (found := getattr(config, name, None))), 0)


def matrices_of(name: str, number: int) -> list[str]:
    """What files call the matrices of expert ``number``, which are side by side in the tensor with this ``name``; empty
    where it is no layer's experts."""
    match = _STACKED.fullmatch(name)
    if not match:
        return []
    parts = ("gate_proj", "up_proj") if match[2] == EXPERTS[0] else ("down_proj",)
    return [f"{match[1]}.{number}.{part}.weight" for part in parts]


def counted(names: Iterable[str]) -> dict[str, int]:
    """How many experts' matrices the ``names`` of a file's tensors are of, by the name of the tensor that has all."""
    found: dict[str, int] = {}
    for name in names:
        if match := _SINGLE.fullmatch(name):
            for part in EXPERTS:
                stacked = f"{match[1]}.{part}"
                found[stacked] = max(found.get(stacked, 0), int(match[2]) + 1)
    return found


def is_experts(name: str, weight: torch.Tensor) -> bool:
    """It is the tensor of a layer's experts."""
    return weight.ndim == 3 and _STACKED.fullmatch(name) is not None


def as_in_files(model_type: str, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """A version's ``weights`` as files of this family have them."""
    for name, weight in weights.items():
        yield from one_as_in_files(model_type, name, weight)


def one_as_in_files(
    model_type: str, name: str, weight: torch.Tensor, first: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """``weight`` as files of this family have it: itself, or each matrix of each expert in it, or all of them turned;
    as views. Its first expert has the number ``first``."""
    if model_type not in IN_MATRICES | TURNED or not is_experts(name, weight):
        yield name, weight
    elif model_type in TURNED:
        yield name, weight.mT
    else:
        for number, expert in enumerate(weight, first):
            names = matrices_of(name, number)
            yield from zip(names, expert.chunk(len(names)), strict=True)
