"""A model that is only read, whose layers lie on several GPUs of one process, in order.

    cuda:0    embedding, layers 0..26
    cuda:1    layers 27..53
    cuda:2    layers 54..79, norm and head

Each device computes its own layers and hands on what it has found. Passes are queued one after the other, so that while
one device computes a pass the one before it computes the next pass.

A copy between GPUs waits for all that either has in its queue, and the host for nothing. So what is carried is carried
from one device to the next, all of it before that one's first layer; and what is asked of a pass lies on the last
(`at_end`): a copy out of the first one's queue, once a later one is at work, would let it stand still until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.services.modeling.attention import Segments
from penstock.services.modeling.towers import decoder_of
from penstock.services.runtime.errors import SetupError

BEHIND = ("norm", "norm_f", "final_layernorm", "final_layer_norm", "embedding_norm", "ln_f")
"""What families call the norm behind their layers. One of another name is computed on the first device."""


def spread(model: Any, devices: Sequence[torch.device], at_end: torch.device, key: str) -> None:
    """Moves ``model``, of transformers, in place, from the host to ``devices``: its decoder's layers dealt out by their
    bytes, and what stands before them on the first. Its hidden states, its norm and its head are ``at_end``, the last
    of them or the first. ``key`` said how many. Raises `SetupError`."""
    if len(devices) == 1:
        model.to(devices[0])
        return
    decoder, base = decoder_of(model), model.base_model
    layers, count = getattr(decoder, "layers", None), len(devices)
    if layers is None or base is model:
        raise SetupError(f"{key}={count}: {model.config.model_type} has no list of layers to deal out; set it to 1")
    if len(layers) < count:
        raise SetupError(f"{key}={count}: the model has {len(layers)} layers; take fewer")
    norm = next((child for name, child in decoder.named_children() if name in BEHIND), None)
    heads = [child for child in model.children() if child is not base]
    behind = [*heads, *([norm] if norm is not None else [])]
    first = _bytes([base]) - _bytes(layers) - _bytes([] if norm is None else [norm])  # a tied matrix is on both
    places = dealt([_bytes([layer]) for layer in layers], first, _bytes(behind), count)
    near = len(getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None) or ())
    places[:near] = [0] * near  # to what these find, what a tower has found is added behind them
    homes = {id(layer): devices[place] for layer, place in zip(layers, places, strict=True)}
    homes |= {id(module): at_end for module in behind}
    _move(model, devices[0], homes)
    carry = _Carrier()
    decoder.register_forward_pre_hook(partial(_begin, carry, devices[0]))
    for module in (child for child in decoder.children() if not isinstance(child, nn.ModuleList)):
        bring = partial(_bring, carry.to, homes.get(id(module), devices[0]))
        module.register_forward_pre_hook(bring, with_kwargs=True)
    for layer in layers:  # others note what layers are given
        bring = partial(_bring, carry.go, homes[id(layer)])
        layer.register_forward_pre_hook(bring, prepend=True, with_kwargs=True)
    decoder.register_forward_hook(partial(_end, carry, at_end))


def dealt(layers: Sequence[int], before: int, behind: int, count: int) -> list[int]:
    """Which of ``count`` devices each of the ``layers`` lies on, so that all have about as many bytes: with what is
    ``before`` these on the first one and ``behind`` them on the last.

    >>> dealt([10, 10, 10, 10, 10, 10], 10, 10, 2), dealt([10, 10, 10], 0, 30, 2)
    ([0, 0, 0, 1, 1, 1], [0, 0, 0])
    """
    share, seen, found = (before + sum(layers) + behind) / count, before, []
    for size in layers:
        found.append(min(count - 1, int((seen + size / 2) / share)))
        seen += size
    return found


class _Carrier:
    """What layers are called with, on the device of whoever is called. What several layers are given, such as the
    angles of positions, is copied once to each device, from the one before, as the first layer there is called."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[Any, Any]] = {}
        """Of what layers were given in this pass, by its `id`: itself, and its copy on the device it came to last."""

    def forget(self) -> None:
        """Another pass begins."""
        self._latest.clear()

    def go(self, given: tuple[tuple[Any, ...], dict[str, Any]], device: torch.device) -> Any:
        """`to`, of what a layer on ``device`` is ``given``; with all that layers before it were, but for their hidden
        states: one behind it may be given the same."""
        args, kwargs = given
        found = self.to(given, device)
        self._note([args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}])
        for itself, _ in [*self._latest.values()]:
            self.to(itself, device)
        return found

    def _note(self, value: Any) -> None:
        if isinstance(value, (torch.Tensor, Segments)):
            self._latest.setdefault(id(value), (value, value))
        elif type(value) in (tuple, list, dict):
            for each in value.values() if type(value) is dict else value:
                self._note(each)

    def to(self, value: Any, device: torch.device) -> Any:
        """``value``, or one like it on ``device``: a tensor, `Segments`, or those in lists, tuples and mappings."""
        if isinstance(value, (torch.Tensor, Segments)):
            itself, latest = self._latest.get(id(value), (value, value))
            if latest.device == device or value.device == device:
                return latest if latest.device == device else value
            self._latest[id(value)] = itself, latest.to(device)
            return self._latest[id(value)][1]
        if type(value) in (tuple, list):
            return type(value)(self.to(each, device) for each in value)
        if type(value) is dict:
            return {name: self.to(each, device) for name, each in value.items()}
        return value


def _begin(carry: _Carrier, device: torch.device, *_: Any) -> None:
    carry.forget()
    _enter(device)


def _bring(
    carry: Callable[[Any, torch.device], Any], device: torch.device, _module: nn.Module, args: Any, kwargs: Any
) -> Any:
    _enter(device)
    return carry((args, kwargs), device)


def _end(carry: _Carrier, device: torch.device, _module: nn.Module, _args: Any, output: Any) -> Any:
    _enter(device)
    output.last_hidden_state = carry.to(output.last_hidden_state, device)
    carry.forget()
    return output


def _enter(device: torch.device) -> None:
    """Torch's own kernels go where their tensors are, and Triton's to the current device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _bytes(modules: Sequence[nn.Module] | nn.ModuleList) -> int:
    return sum(tensor.nbytes for module in modules for tensor in (*module.parameters(), *module.buffers()))


def _move(module: nn.Module, device: torch.device, homes: dict[int, torch.device]) -> None:
    """``module`` to ``device``, and what is within it to its own of ``homes``, by `id`. What is tied and lies on two
    devices is there twice."""
    device = homes.get(id(module), device)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.detach().to(device), requires_grad=False)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else buffer.to(device)
    for child in module.children():
        _move(child, device, homes)
