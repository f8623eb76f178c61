"""A version that is an adapter alone (`trainer.lora.publish`), as the whole weights that engines load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch

from penstock.services.modeling.buffers import persistent_buffers
from penstock.services.modeling.dtypes import DTYPES
from penstock.services.modeling.load import ModelError, empty_model, folder_of
from penstock.services.modeling.weight_files import WeightFiles
from penstock.services.runtime.errors import SetupError

A, B, LENGTHS = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
"""Behind a layer's name: fp32 ``[rank, inputs]``; ``[outputs, rank]``, scaled already; DoRA's ``[outputs]``."""


def merge(
    base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lengths: torch.Tensor | None, scale: float = 1.0
) -> torch.Tensor:
    """Rows of a matrix with what its adapter adds, fp32: ``base`` ``[rows, inputs]``, all of ``a``, the same rows of
    ``b``, and DoRA's ``lengths`` of these rows, where it has some."""
    merged = base.addmm(b, a, alpha=scale)
    if lengths is not None:  # Liu et al. 2024, DoRA, equation 5
        merged *= (lengths / merged.norm(dim=1))[:, None]
    return merged


def is_alone(names: Mapping[str, object]) -> bool:
    """These are an adapter's tensors."""
    return any(name.endswith(A) for name in names)


class AdapterBase:
    """The model at ``path``, a folder or a hub name, that adapters of a run are added to; its files are mapped when the
    first one comes, and stay so."""

    def __init__(self, path: str, dtype: str) -> None:
        self._path, self._dtype = path, DTYPES[dtype]

    @cached_property
    def _model(self) -> Any:
        return empty_model(self._path)

    @cached_property
    def _files(self) -> WeightFiles:
        return WeightFiles(folder_of(self._path), self._model).__enter__()

    @cached_property
    def _names(self) -> dict[str, torch.dtype]:
        """Of the model's weights in the files, which may have more, such as heads that predict several tokens; and what
        each is made as: buffers are no part of what is computed in few bits."""
        known, whole = self._model.state_dict(), persistent_buffers(self._model)
        return {n: torch.float32 if n in whole else self._dtype for n in self._files.names if n in known}

    def check(self, names: Iterable[str]) -> None:
        """Finds the files, which takes long where they come from the hub. Raises `ModelError`, or `SetupError` where
        they lack one of these ``names``, the model's own."""
        files = self._files
        if lacking := [name for name in names if name not in files]:
            raise SetupError(
                f"trainer.lora.publish: the safetensors files of {self._path} have no {lacking[0]}, so nobody could "
                "merge an adapter with them; use publish=merged"
            )

    def whole(self, version: Mapping[str, torch.Tensor], device: torch.device) -> Mapping[str, torch.Tensor]:
        """``version`` itself, or, where it is an adapter alone, all weights with it merged, as the trainer would have
        merged them, made on ``device`` one by one when they are asked for. Raises `ModelError` where it is of another
        model."""
        if not is_alone(version):
            return version
        layers = {name.removesuffix(A) for name in version if name.endswith(A)}
        for layer in layers:
            if f"{layer}.weight" not in self._files:
                raise ModelError(f"{self._path} has no {layer}.weight, to which the version's adapter adds")
        return _Merged(self._files, self._names, version, layers, device)


class _Merged(Mapping[str, torch.Tensor]):
    """See `AdapterBase.whole`."""

    def __init__(
        self,
        files: WeightFiles,
        names: Mapping[str, torch.dtype],
        adapter: Mapping[str, torch.Tensor],
        layers: set[str],
        device: torch.device,
    ) -> None:
        self._files, self._names, self._adapter, self._layers = files, names, adapter, layers
        self._device = device

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # and not by making it, as a Mapping would

    def __len__(self) -> int:
        return len(self._names)

    @torch.no_grad()
    def __getitem__(self, name: str) -> torch.Tensor:
        dtype = self._names[name]
        block = tuple(slice(None) for _ in self._files.shape(name))
        base = self._files.block(name, block).to(self._device, dtype)
        layer = name.removesuffix(".weight")
        if layer == name or layer not in self._layers:
            return base
        lengths = self._part(layer + LENGTHS) if layer + LENGTHS in self._adapter else None
        return merge(base.float(), self._part(layer + A), self._part(layer + B), lengths).to(dtype)

    def _part(self, name: str) -> torch.Tensor:
        return self._adapter[name].to(self._device)
