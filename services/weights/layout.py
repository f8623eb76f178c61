"""Where named tensors lie in the flat buffer of `protocols.versions`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from penstock.protocols.versions import BUCKET_BYTES, Layout, Weight, lay_out
from penstock.services.modeling.dtypes import DTYPES

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


def make_layout(
    shapes: Mapping[str, tuple[int, ...]], dtype: str, bucket_bytes: int = BUCKET_BYTES, own: Mapping[str, str] = {}
) -> Layout:
    """The layout of tensors with these shapes, sent as ``dtype``, or as the ``own`` one of some."""

    def placed(name: str) -> tuple[str, str, tuple[int, ...], int]:
        sent, shape = own.get(name, dtype), shapes[name]
        return name, sent, shape, int(np.prod(shape)) * DTYPES[sent].itemsize

    return lay_out(map(placed, in_order(shapes)), bucket_bytes)


def view_weight(weight: Weight, buffer: torch.Tensor) -> torch.Tensor:
    """One tensor's place in ``buffer``, as a tensor of its dtype and shape."""
    return buffer[weight.offset : weight.offset + weight.nbytes].view(DTYPES[weight.dtype]).view(weight.shape)


def view_weights(layout: Layout, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """All tensors of a version, by name, without a copy."""
    return {weight.name: view_weight(weight, buffer) for weight in layout.weights}
