"""Named tensors to the flat buffer of `protocols.weights`, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from protocols.weights import Manifest, Weight, layout, make_manifest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def place(named: Iterable[tuple[str, torch.Tensor]], dtype: str) -> tuple[tuple[Weight, ...], int]:
    """The layout of ``named`` tensors sent as ``dtype``; with the buffer's size in bytes."""
    size = DTYPES[dtype].itemsize
    return layout((name, dtype, tuple(t.shape), t.numel() * size) for name, t in named)


def write(named: Iterable[tuple[str, torch.Tensor]], weights: tuple[Weight, ...], buffer: torch.Tensor) -> None:
    """Copies the tensors to their places in ``buffer`` (uint8 ``[bytes]``), casting to the declared dtype."""
    for weight, (name, tensor) in zip(weights, named, strict=True):
        assert weight.name == name
        view(weight, buffer).copy_(tensor.detach())


def manifest_of(named: Sequence[tuple[str, torch.Tensor]], dtype: str, bucket_bytes: int) -> Manifest:
    """The manifest that publishing ``named`` as ``dtype`` would have."""
    weights, nbytes = place(named, dtype)
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    write(named, weights, buffer)
    return make_manifest(weights, as_memory(buffer), bucket_bytes)


def view(weight: Weight, buffer: torch.Tensor) -> torch.Tensor:
    """One tensor's place in ``buffer``, as a tensor of its dtype and shape."""
    return buffer[weight.offset : weight.offset + weight.nbytes].view(DTYPES[weight.dtype]).view(weight.shape)


def views(manifest: Manifest, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """All tensors of a version, by name, without a copy."""
    return {weight.name: view(weight, buffer) for weight in manifest.weights}


def as_memory(buffer: torch.Tensor) -> memoryview:
    """The bytes of a host buffer."""
    return memoryview(buffer.numpy())


def from_memory(memory: memoryview) -> torch.Tensor:
    """A uint8 tensor over ``memory``, without a copy."""
    return torch.from_numpy(np.frombuffer(memory, np.uint8))
