"""The static KV cache: one slot a sequence, the running ones always in front."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.services.modeling.pinned import to_device


def row_of_each(slots: Sequence[Sequence[int] | torch.Tensor], device: torch.device) -> torch.Tensor:
    """int64 ``[all slots]``: which sequence fills it, where the first fills all of ``slots[0]``, and so on. A device is
    asked for nothing, as it is where it has to count."""
    counts = torch.tensor([len(each) for each in slots])
    return to_device(torch.arange(len(slots)).repeat_interleave(counts), device)


class SlotCache:
    """Keys and values of ``slots`` sequences of up to ``length`` tokens; a layer's are ``[slots, heads, length, dim]``,
    the values with ``value_dim`` where that is another.

    Slots ``[0, active)`` are in use, so every decoding step works on plain slices.
    """

    def __init__(
        self, layers: int, slots: int, heads: int, length: int, dim: int, dtype: torch.dtype, device: torch.device,
        value_dim: int | None = None,
    ) -> None:  # fmt: skip
        def made(size: int) -> list[torch.Tensor]:
            return [torch.zeros((slots, heads, length, size), dtype=dtype, device=device) for _ in range(layers)]

        self.keys, self.values = made(dim), made(value_dim or dim)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of it."""
        return [*self.keys, *self.values]

    def fill(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes whole sequences: ``keys`` and ``values`` ``[len(slots), heads, tokens, dim]`` from position 0."""
        self.keys[layer][slots, :, : keys.shape[2]] = keys
        self.values[layer][slots, :, : values.shape[2]] = values

    def append(
        self, layer: int, rows: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Writes one token for each of the first rows: ``keys`` and ``values`` ``[rows, heads, dim]``."""
        self.keys[layer][rows, :, positions] = keys
        self.values[layer][rows, :, positions] = values

    def move(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """Copies the first ``length`` positions of the ``source`` slots over the ``target`` slots."""
        for tensor in self.tensors:
            tensor[target, :, :length] = tensor[source, :, :length]
