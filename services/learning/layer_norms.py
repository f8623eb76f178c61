"""How long each layer's gradient is, and how far an update moves it (`trainer.norms_every`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import torch

from penstock.services.modeling.parallel.fsdp import local, squares
from penstock.services.modeling.parallel.world import World

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_ENDS = {"embed_tokens": "embedding", "lm_head": "head", "norm": "norm"}


def layer_of(name: str) -> str:
    """What the layer of a parameter is called: its number, ``embedding``, ``head``, ``norm`` for the last one, or
    ``rest``."""
    if found := _LAYER.search(name):
        return found[1]
    return next((said for part, said in _ENDS.items() if part in name), "rest")


class LayerNorms:
    """Of one update of a model with these ``parameters``; every rank calls every method. Weights are copied to the
    host meanwhile."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], world: World) -> None:
        self._parameters, self._world = parameters, world
        layers = world.of_stages({layer_of(name): 0 for name in parameters})
        self._place = {layer: number for number, layer in enumerate(layers)}
        self._gradients: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._before: dict[str, torch.Tensor] = {}

    def before(self) -> None:
        """The gradient is whole, and not clipped; no weight has changed."""
        every = self._parameters.items()
        self._gradients = self._by_layer((name, local(p.grad)) for name, p in every if p.grad is not None)
        self._weights = self._by_layer((name, local(p.detach())) for name, p in every)
        self._before = {name: local(p.detach()).to("cpu", copy=True) for name, p in self._parameters.items()}

    def after(self) -> dict[str, float]:
        """The weights have changed. ``layer/NAME/grad_norm``, and ``layer/NAME/update``: the length of what was added
        as a share of what was there."""
        moved = self._by_layer(
            (name, local(p.detach()) - self._before.pop(name).to(p.device)) for name, p in self._parameters.items()
        )
        found = {f"layer/{layer}/grad_norm": norm for layer, norm in self._gradients.items()}
        return found | {f"layer/{layer}/update": moved[layer] / max(self._weights[layer], 1e-12) for layer in moved}

    def _by_layer(self, values: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
        total = torch.zeros(len(self._place), dtype=torch.float64, device=self._world.device)
        for name, value in values:  # one after the other: there may be no room for all
            total[self._place[layer_of(name)]] += squares(value, self._parameters[name], self._world)
        sums = self._world.add(total).tolist()
        return {layer: math.sqrt(sum_) for layer, sum_ in zip(self._place, sums, strict=True)}
