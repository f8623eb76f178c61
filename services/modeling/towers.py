"""Models of words and pictures: the decoder reads, and the towers that see stand beside it.

A tower's weights are in every version and checkpoint, so that whoever loads one finds the whole model; as they came,
unless they are trained.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def decoder_of(model: Any) -> Any:
    """The module of ``model``, of transformers, whose ``layers`` read text; of a family that calls them otherwise, one
    without that list."""
    base = model.base_model
    return base if getattr(base, "layers", None) is not None else model.get_decoder()


def towers(model: Any) -> dict[str, nn.Module]:
    """By name, what stands beside the decoder within ``model``: what sees or hears, and what makes its findings fit."""
    base, decoder = model.base_model, decoder_of(model)
    if decoder is base or not any(module is decoder for module in base.modules()):
        return {}
    beside = {name: child for name, child in base.named_children() if all(m is not decoder for m in child.modules())}
    prefix = "" if base is model else f"{model.base_model_prefix}."
    return {f"{prefix}{name}": child for name, child in beside.items() if any(True for _ in child.parameters())}


def learns(tower: nn.Module) -> bool:
    """Some of ``tower`` is trained."""
    return any(parameter.requires_grad for parameter in tower.parameters())


def tower_blocks(tower: nn.Module) -> list[nn.Module]:
    """Where ``tower`` learns, the layers that it has one after the other."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = (module for module in tower.modules() if isinstance(module, GradientCheckpointingLayer))
    return [*layers] if learns(tower) else []


def freeze_towers(model: Any) -> None:
    """They learn nothing: no optimizer need know them."""
    for tower in towers(model).values():
        tower.requires_grad_(False)
