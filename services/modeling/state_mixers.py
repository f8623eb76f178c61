"""What mixes tokens by a state instead of attention (linear attention, Mamba, short convolutions), over packed rows.

A state runs through its sequence from the first token on. So each sequence of a row gets its own: it is laid out whole,
its prompt before it, with others of about its length below each other, padded at the end, where no state of a real
token comes from. Attention, feed-forward parts, embedding and head go on reading the packed row, and a shared prompt
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.services.modeling.pinned import to_device
from penstock.services.modeling.towers import decoder_of

ALIKE = 0.75
"""Sequences that lie below each other have at least this share of the longest one's tokens."""


class Whole:
    """Where the tokens of a packed row's sequences lie when each is laid out whole; see `attention.Segments` for what
    it is made of. Made when it is first asked for, since few models do, and by all layers of a pass alike."""

    def __init__(
        self, starts_q: np.ndarray, starts_k: np.ndarray, keys: np.ndarray | None, device: torch.device
    ) -> None:
        self._starts_q, self._starts_k, self._keys, self._device = starts_q, starts_k, keys, device
        self._batches: list[torch.Tensor] = []
        self._back: torch.Tensor | None = None

    def to(self, device: torch.device) -> Whole:
        """For a row on ``device``."""
        return Whole(self._starts_q, self._starts_k, self._keys, device)

    def mixed(self, mix: Callable[[torch.Tensor], torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        """What ``mix`` makes of the sequences of ``row`` ``[1, length, size]``: it is given ``[sequences, longest,
        size]``, several times."""
        if self._back is None:
            batches, back = self._lay_out()
            self._batches = [to_device(torch.from_numpy(batch), self._device) for batch in batches]
            self._back = to_device(torch.from_numpy(back), self._device)
        found = torch.cat([mix(row[0, batch]).flatten(0, 1) for batch in self._batches])
        return found[self._back][None]

    def _lay_out(self) -> tuple[list[np.ndarray], np.ndarray]:
        """For each batch, int64 ``[sequences, longest]``, the token of the row that stands there; and for each token of
        the row, int64 ``[length]``, where in all batches, flat, it is."""
        sizes = np.diff(self._starts_k)
        order = np.argsort(-sizes, kind="stable")
        back = np.zeros(int(self._starts_q[-1]), np.int64)
        batches, at, begin = [], 0, 0
        while begin < len(order):
            longest = int(sizes[order[begin]])
            end = begin + int(np.count_nonzero(sizes[order[begin:]] >= ALIKE * longest))
            # Padding reads tokens one after the other: nothing comes back to them, but many at one place would wait.
            batch = np.arange((end - begin) * longest, dtype=np.int64).reshape(-1, longest) % len(back)
            for line, number in enumerate(order[begin:end].tolist()):
                size, (first, last) = int(sizes[number]), self._starts_q[number : number + 2].tolist()
                batch[line, :size] = self._places(number)
                ends = at + line * longest + size
                back[first:last] = np.arange(ends - (last - first), ends)
            batches.append(batch)
            at, begin = at + batch.size, end
        return batches, back

    def _places(self, number: int) -> np.ndarray:
        first, last = self._starts_k[number : number + 2].tolist()
        return np.arange(first, last) if self._keys is None else self._keys[first:last]


def take_packed_rows(model: Any) -> None:
    """Has all such layers of ``model``, of transformers, heed the ``segments`` that the model is called with."""
    for layer in getattr(decoder_of(model), "layers", None) or ():
        for mixer in mixers(layer):
            _wrap(layer, mixer)


def mixers(module: nn.Module) -> list[nn.Module]:
    """Those within ``module``: each of them has a convolution over tokens."""
    return [each for each in module.modules() if any(isinstance(child, nn.Conv1d) for child in each.children())]


def _wrap(layer: nn.Module, mixer: nn.Module) -> None:
    segments: list[Any] = [None]
    own = mixer.forward

    def note(_layer: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        segments[0] = kwargs.get("segments")

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if segments[0] is None:
            found: torch.Tensor = own(hidden_states, *args, **kwargs)
            return found
        kwargs.pop("segments", None)  # some hand all that they are given to their kernels
        return segments[0].whole.mixed(lambda sequences: own(sequences, *args, **kwargs), hidden_states)

    # Not every family hands what its layers are called with on to what mixes; computed again, a layer is called again.
    layer.register_forward_pre_hook(note, with_kwargs=True)
    mixer.forward = forward
