"""Models some of whose layers keep a state instead of keys and values (linear attention, Mamba, short convolutions),
run by transformers' own code over our slots: Qwen 3.5, LFM2, Granite 4, Falcon-H1, Nemotron-H."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from penstock.services.rollout.engines.torch.cache import SlotCache
from penstock.services.rollout.engines.torch.hosted import FULL, HostedModel, SlotLayer, UnfitError

KINDS = (DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
"""Of layers, in transformers' cache: keys and values, a state, both."""


class _States:
    """What one layer keeps of each sequence beside keys and values: tensors ``[slots, …]``, by their number."""

    def __init__(self, like: LinearAttentionLayer, slots: int) -> None:
        self.count: int = like.number_of_states
        self.conv, self.recurrent = (
            {n: each.new_zeros((slots, *each.shape[1:])) for n, each in found.items() if each is not None}
            for found in (like.conv_states, like.recurrent_states)
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of it."""
        return [*self.conv.values(), *self.recurrent.values()]

    def fill(self, slots: torch.Tensor, source: LinearAttentionLayer, rows: torch.Tensor) -> None:
        """Writes whole sequences: to each slot the one of ``source`` that ``rows`` says."""
        for mine, found in ((self.conv, source.conv_states), (self.recurrent, source.recurrent_states)):
            for number, tensor in mine.items():
                tensor[slots] = found[number].index_select(0, rows)

    def show(self, layer: LinearAttentionLayer, count: int) -> None:
        """Gives ``layer`` the states of the first ``count`` slots: what a step changes, it changes in them."""
        for number, tensor in self.conv.items():
            layer.conv_states[number] = tensor[:count]
            layer.conv_kernel_size[number] = tensor.shape[-1]
            layer.is_conv_states_initialized[number] = layer.has_previous_state[number] = True
        for number, tensor in self.recurrent.items():
            layer.recurrent_states[number] = tensor[:count]
            layer.is_recurrent_states_initialized[number] = layer.has_previous_state[number] = True


class _BothLayer(LinearAttentionLayer, SlotLayer):
    """A layer that keeps a state, and keys and values beside it, for one decoding step."""

    def __init__(self, states: int, cache: SlotCache, layer: int, positions: torch.Tensor, span: int) -> None:
        SlotLayer.__init__(self, cache, layer, positions, span)
        LinearAttentionLayer.__init__(self, states)


class HybridModel(HostedModel):
    """`HostedModel`, with states in the slots too. A state is of all tokens that were run, padding too, so that rows of
    one length alone go into one prefill. Raises `UnfitError`."""

    def move(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """As `NativeModel.move`."""
        super().move(source, target, length)
        for tensor in self._of_states:
            tensor[target] = tensor[source]

    @property
    def cached(self) -> list[torch.Tensor]:
        """As `NativeModel.cached`."""
        return [*super().cached, *self._of_states]

    @property
    def _of_states(self) -> list[torch.Tensor]:
        return [tensor for states in self._states if states for tensor in states.tensors]

    def runs(self, lengths: Sequence[int], width: int) -> list[tuple[list[int], int]]:
        """As `HostedModel.runs`."""
        alike: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            alike.setdefault(length, []).append(row)
        return [
            ([rows[row] for row in some], length)
            for length, rows in alike.items()
            for some, _ in super(HybridModel, self).runs([length] * len(rows), length)
        ]

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._text)

    def _fill(self, layers: Sequence[Any], slots: torch.Tensor, rows: torch.Tensor) -> None:
        super()._fill(_attending(layers), slots, rows)
        for layer, states in zip(layers, self._states, strict=True):
            if states is not None:
                states.fill(slots, layer, rows)

    def _layers(self, positions: torch.Tensor, span: int) -> list[Any]:
        layers: list[Any] = []
        for place, states in zip(self._places, self._states, strict=True):
            many = states.count if states else 1
            if place is None:
                layers.append(LinearAttentionLayer(many))
            elif states is None:
                layers.append(SlotLayer(self.cache, place, positions, span))
            else:
                layers.append(_BothLayer(many, self.cache, place, positions, span))
            if states is not None:
                states.show(layers[-1], len(positions))
        return layers

    def _mask(self, positions: torch.Tensor, span: int) -> Any:
        """As `HostedModel`'s, for each kind of layer; none for those that keep a state alone."""
        shown = super()._mask(positions, span)
        own = dict.fromkeys(self._attending, shown) | dict.fromkeys(self._stateful)
        return {FULL: shown, "linear_attention": None} | own  # some families ask by these names whatever theirs are

    # --- the trial ---------------------------------------------------------------------------------------------------

    def _check_kinds(self) -> None:
        """Any; the trial shows."""

    def _slots_like(self, layers: Sequence[Any], slots: int, length: int, dtype: torch.dtype) -> SlotCache:
        if odd := {type(layer).__name__ for layer in layers if type(layer) not in KINDS}:
            raise UnfitError(f"layers that keep something else: {', '.join(sorted(odd))}")
        attend = _attending(layers)
        numbers = {id(layer): number for number, layer in enumerate(attend)}
        self._places = [numbers.get(id(layer)) for layer in layers]
        """Of each layer: which of the cache's it is; None: it keeps a state alone."""
        states = [_States(each, slots) if isinstance(each, LinearAttentionLayer) else None for each in layers]
        self._states = [each if each and each.tensors else None for each in states]
        types = getattr(self._text, "layer_types", None) or [FULL] * len(states)
        self._attending = {kind for kind, place in zip(types, self._places, strict=True) if place is not None}
        self._stateful = set(types) - self._attending
        return super()._slots_like(attend, slots, length, dtype)


def _attending(layers: Sequence[Any]) -> list[Any]:
    """Those that keep keys and values."""
    return [layer for layer in layers if isinstance(layer, DynamicLayer)]
