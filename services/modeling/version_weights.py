"""What a version of a model consists of: its parameters, and the buffers that its files fill, such as the biases by
which some mixtures choose experts."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from penstock.services.modeling.buffers import persistent_buffers
from penstock.services.modeling.load import empty_model


def version_of(model: Any) -> dict[str, torch.Tensor]:
    """All that a version has of a ``model`` that is not cut: its own memory."""
    return {**{name: parameter.detach() for name, parameter in model.named_parameters()}, **persistent_buffers(model)}


def weight_names(path: str) -> frozenset[str]:
    """Of all weights of the model at ``path``, a folder or a hub name, those that are tied included. Raises
    `ModelError`."""
    return frozenset(_counted(path))


def weight_count(path: str) -> int:
    """How many numbers they are. Raises `ModelError`."""
    return sum(_counted(path).values())


@cache
def _counted(path: str) -> dict[str, int]:
    return {name: weight.numel() for name, weight in empty_model(path).state_dict().items()}
