"""Routing of tokens to experts, noted while a model runs, or given to it: routing replay (R3), Ma et al. 2025,
arXiv:2510.11370.

An engine and a trainer that compute a router's logits a little differently may choose other experts for a token, and
its log-probability then jumps. A replayed router sends it where the engine has sent it; how much each of these experts
counts is the trainer's own, and has a gradient.
"""

from __future__ import annotations

import re
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.protocols.routing import Mixture, routing_dtype, unknown
from penstock.services.modeling.experts import EXPERTS, experts_of
from penstock.services.modeling.parallel.stages import Stage
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime.errors import SetupError

OPEN = -1
"""Among given experts: the router chooses by itself."""


def routers(model: nn.Module) -> list[Any]:
    """The router of each layer of experts, in order."""
    return [router for module in model.modules() if (router := _router(module)) is not None]


def _router(module: nn.Module) -> nn.Module | None:
    """Beside the ``experts`` of ``module``, where it has some."""
    experts = getattr(module, "experts", None)
    if not all(hasattr(experts, name) for name in EXPERTS):
        return None
    return getattr(module, "gate", None) or getattr(module, "router", None)


class Recorder:
    """Notes which experts ``model`` sends tokens to, in the thread that asks for it."""

    def __init__(self, model: nn.Module) -> None:
        self._thread = threading.local()
        self._routers = routers(model)
        for router in self._routers:
            router.register_forward_hook(self._note)

    @property
    def fits(self) -> bool:
        """There is something to note."""
        return bool(self._routers)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers, and experts of a token."""
        return len(self._routers), self._routers[0].top_k

    @property
    def dtype(self) -> np.dtype:
        """Of what it notes."""
        return routing_dtype(self._routers[0].num_experts)

    @contextmanager
    def noting(self) -> Iterator[list[torch.Tensor]]:
        """Around one forward pass: its list has int64 ``[tokens, experts]`` for each layer then, rows one behind the
        other."""
        found: list[torch.Tensor] = []
        self._thread.found = found
        try:
            yield found
        finally:
            self._thread.found = None

    def _note(self, router: nn.Module, inputs: Any, outputs: Any) -> None:
        found = getattr(self._thread, "found", None)
        if found is not None:
            found.append(next(each for each in outputs if not each.is_floating_point()))


class Replay:
    """Has the routers of ``model`` take what `logprobs.model_inputs` gives as ``routing``. Every layer of experts gets
    its own part as it begins, also when it is computed again for the gradient."""

    def __init__(self, model: Any) -> None:
        places, config = _places(model), model.config.get_text_config()
        if not places:
            raise SetupError(
                f"rollout.sampling.routing_replay: {model.config.model_type} is no mixture of experts that is known; "
                "set it to false"
            )
        self.mixture = Mixture(len(places), config.num_experts_per_tok, experts_of(config))
        self._other = torch.zeros(2, dtype=torch.float64)
        """Choices that the router would have made otherwise, and all that were given."""
        for number, layer in enumerate(model.get_decoder().layers):
            inner = routers(layer)
            for router in inner:
                router.forward = types.MethodType(self._forward, router)
            layer.register_forward_pre_hook(_handing_over(inner, places.get(number)), with_kwargs=True)
        model.penstock_replay = self

    def take_metrics(self, world: World) -> dict[str, float]:
        """``routing_other``: of the choices that were given since it was last asked, the share that the trainer's own
        router would have made otherwise. Every rank calls it."""
        other, all_ = world.sum(self._other.tolist())
        self._other.zero_()
        return {"routing_other": other / all_} if all_ else {}

    def _forward(self, router: Any, *args: Any, **kwargs: Any) -> Any:
        given = getattr(router, "penstock_given", None)
        if given is None:
            return type(router).forward(router, *args, **kwargs)
        with _Choosing(given, self.mixture.experts) as choosing:
            found = type(router).forward(router, *args, **kwargs)
        assert choosing.chosen is not None, "a router chooses the likeliest experts"
        with torch.no_grad():
            known = given >= 0
            other = known & (given[:, :, None] != choosing.chosen[:, None, :]).all(-1)
            self._other = self._other.to(other.device)
            self._other += torch.stack([other.sum(), known.sum()])
        return found


class _Choosing(TorchFunctionMode):
    """While a router of so many ``experts`` runs, which is its family's own code, it finds those the likeliest that are
    ``given``, int64 ``[tokens, experts of a token]``. What else it looks for, such as the likeliest group of experts,
    it finds as ever."""

    def __init__(self, given: torch.Tensor, experts: int) -> None:
        super().__init__()
        self._given, self._experts = given, experts
        self.chosen: torch.Tensor | None = None
        """What it would have chosen."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, torch.Tensor.topk):
            return found
        scores: torch.Tensor = args[0]
        if scores.ndim != 2 or scores.shape[1] != self._experts or found[1].shape != self._given.shape:
            return found
        self.chosen = found[1]
        taken = torch.where(self._given >= 0, self._given, self.chosen)
        return scores.gather(-1, taken), taken


def _places(model: Any) -> dict[int, int]:
    """For each layer of experts, also of a pipeline's other stages, its place among them."""
    stage: Stage | None = getattr(model, "penstock_stage", None)
    names = stage.names if stage else [name for name, _ in model.named_parameters()]
    found = (re.search(rf"\blayers\.(\d+)\.[^.]+\.experts\.{EXPERTS[0]}$", name) for name in names)
    return {layer: place for place, layer in enumerate(sorted(int(match[1]) for match in found if match))}


def _handing_over(inner: Sequence[Any], place: int | None) -> Any:
    """What runs before a decoder layer: takes ``routing`` ``[rows, length, layers, experts]`` from its arguments."""

    def hook(_layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        routing = kwargs.pop("routing", None)
        for router in inner:
            router.penstock_given = None if routing is None else routing[:, :, place].flatten(0, 1).long()
        return args, kwargs

    return hook


def mixture_of(model: nn.Module) -> Mixture | None:
    """Whose routing ``model`` replays; None where it replays none."""
    replay: Replay | None = getattr(model, "penstock_replay", None)
    return replay.mixture if replay else None


def as_given(routing: np.ndarray) -> np.ndarray:
    """int16 ``[tokens, layers, experts]``: `OPEN` where it is not known, and in all of a layer's experts of a token
    where one is not."""
    found = routing.astype(np.int16)
    found[(routing == unknown(routing.dtype)).any(-1)] = OPEN
    return found
