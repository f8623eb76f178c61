"""A copy of a model's towers alone, which look at pictures while the model itself is cut over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.services.modeling.load import ModelError, empty_model, folder_of, load_model
from penstock.services.modeling.towers import towers
from penstock.services.modeling.weight_files import WeightFiles


class TowerCopy:
    """Of the model at ``path``, in ``dtype``, on ``device``; loaded when it is asked for first."""

    def __init__(self, path: str, dtype: torch.dtype, device: torch.device) -> None:
        self._path, self._dtype, self._device = path, dtype, device
        self._base: Any = None

    def base(self) -> Any:
        """transformers' base model; what it has beside its towers has no memory. Raises `ModelError`."""
        if self._base is None:
            self._base = _load_towers(self._path, self._dtype, self._device)
        return self._base

    def beside(self) -> list[torch.Tensor]:
        """What lies on the device."""
        every = towers(self._base).values() if self._base is not None else ()
        return [part for tower in every for part in (*tower.parameters(), *tower.buffers())]


def _load_towers(path: str, dtype: torch.dtype, device: torch.device) -> Any:
    model = empty_model(path)
    names = {name: [name for name, _ in tower.named_parameters(prefix=name)] for name, tower in towers(model).items()}
    with WeightFiles(folder_of(path), model) as files:
        if any(name not in files for each in names.values() for name in each):
            return _only_towers(load_model(path, str(dtype).removeprefix("torch."), torch.device("cpu")), device)
        for place in names:
            tower = _made(model.get_submodule(place), dtype).to(device)
            for name, parameter in tower.named_parameters():
                whole = tuple(slice(None) for _ in parameter.shape)
                parameter.data.copy_(files.block(f"{place}.{name}", whole))
            parent, _, own = place.rpartition(".")
            setattr(model.get_submodule(parent), own, tower.requires_grad_(False).eval())
    return model.base_model


def _made(tower: Any, dtype: torch.dtype) -> Any:
    """A tower in memory, with whatever it computes from its config."""
    if hasattr(type(tower), "_from_config"):
        return type(tower)._from_config(tower.config, dtype=dtype)
    if any(True for _ in tower.buffers()):
        raise ModelError(f"model.path: {type(tower).__name__} keeps numbers that no file has; prompts must be text")
    return tower.to_empty(device="cpu").to(dtype)


def _only_towers(model: Any, device: torch.device) -> Any:
    kept = {id(module) for tower in towers(model).values() for module in tower.modules()}
    for module in model.modules():
        if id(module) in kept:
            continue
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
    for tower in towers(model).values():
        tower.requires_grad_(False).eval().to(device)
    return model.base_model
