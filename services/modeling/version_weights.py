"""What a version of a model consists of: its parameters, and the buffers that its files fill, such as the biases by
which some mixtures choose experts."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from penstock.services.modeling.load import empty_model


def persistent_buffers(model: Any) -> dict[str, torch.nn.Buffer]:
    """Those that files fill and nothing trains, by their names, as views; not what is computed from the config, nor
    whole numbers, which count or order something. Of a cut model they are whole on every rank."""
    return {
        f"{prefix}.{name}".lstrip("."): torch.nn.Buffer(buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set and buffer.is_floating_point()
    }


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
