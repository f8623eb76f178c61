"""Named tensors to the flat buffer of `protocols.weights`, and back."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable

import numpy as np
import torch

from protocols.weights import BUCKET_BYTES, Layout, Weight, layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that engines compute as one matrix: side by side in the buffer, they are one without a copy."""
_PROJECTION = re.compile(rf"(.*\.)({'|'.join(name for family in FUSED for name in family)})\.(weight|bias)")


def in_order(names: Iterable[str]) -> list[str]:
    """``names`` with the weights, then the biases, of each family of `FUSED` side by side, at its first one's place."""
    ordered: dict[str, list[str]] = {}
    for name in names:
        match = _PROJECTION.fullmatch(name)
        key = name
        if match:
            family = next(index for index, family in enumerate(FUSED) if match[2] in family)
            key = f"{match[1]}{family}.{match[3]}"
        ordered.setdefault(key, []).append(name)

    def place(name: str) -> int:
        match = _PROJECTION.fullmatch(name)
        return next(family.index(match[2]) for family in FUSED if match[2] in family) if match else 0

    return [name for group in ordered.values() for name in sorted(group, key=place)]


def place(shapes: dict[str, tuple[int, ...]], dtype: str, bucket_bytes: int = BUCKET_BYTES) -> Layout:
    """The layout of tensors with these shapes, sent as ``dtype``."""
    size = DTYPES[dtype].itemsize
    weights = ((name, dtype, shapes[name], int(np.prod(shapes[name])) * size) for name in in_order(shapes))
    return layout(weights, bucket_bytes)


def view(weight: Weight, buffer: torch.Tensor) -> torch.Tensor:
    """One tensor's place in ``buffer``, as a tensor of its dtype and shape."""
    return buffer[weight.offset : weight.offset + weight.nbytes].view(DTYPES[weight.dtype]).view(weight.shape)


def views(where: Layout, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """All tensors of a version, by name, without a copy."""
    return {weight.name: view(weight, buffer) for weight in where.weights}


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Bytes (uint8 ``[bytes]``) from one buffer to another. On the host by the C library's memcpy, in one thread:
    torch's copy takes longer in one, and in several it takes cores from what computes beside."""
    if source.is_cpu and target.is_cpu:
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


def as_memory(buffer: torch.Tensor) -> memoryview:
    """The bytes of a host buffer."""
    return memoryview(buffer.numpy())


def as_array(memory: memoryview) -> np.ndarray:
    """uint8 over ``memory``, without a copy."""
    return np.frombuffer(memory, np.uint8)


def from_memory(memory: memoryview) -> torch.Tensor:
    """A uint8 tensor over ``memory``, without a copy; where that is read-only, writing to it ends the process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)
