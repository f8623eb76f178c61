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

from penstock.protocols.routing import Mixture, routing_dtype, unknown
from penstock.services.modeling.experts import EXPERTS
from penstock.services.modeling.parallel.stages import Stage
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime.errors import SetupError

OPEN = -1
"""Among given experts: the router chooses by itself."""


def routers(model: nn.Module) -> list[Any]:
    """The router of each layer of experts, in order: transformers calls it ``gate``, beside its ``experts``."""
    return [module.gate for module in model.modules() if _is_mixture(module)]


def _is_mixture(module: nn.Module) -> bool:
    experts = getattr(module, "experts", None)
    return hasattr(module, "gate") and all(hasattr(experts, name) for name in EXPERTS)


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
            found.append(outputs[2])


class Replay:
    """Has the routers of ``model`` take what `logprobs.model_inputs` gives as ``routing``. Every layer of experts gets
    its own part as it begins, also when it is computed again for the gradient."""

    def __init__(self, model: Any) -> None:
        found, places, config = routers(model), _places(model), model.config.get_text_config()
        if not places:
            raise SetupError(
                f"rollout.sampling.routing_replay: {model.config.model_type} is no mixture of experts that is known; "
                "set it to false"
            )
        # A pipeline's stage may have none of them.
        of_token, experts = (found[0].top_k, found[0].num_experts) if found else (
            config.num_experts_per_tok, config.num_experts,
        )  # fmt: skip
        self.mixture = Mixture(len(places), of_token, experts)
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

    def _forward(self, router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, weights, chosen = type(router).forward(router, hidden)
        given = getattr(router, "penstock_given", None)
        if given is None:
            return logits, weights, chosen
        known = given >= 0
        taken = torch.where(known, given, chosen)
        with torch.no_grad():
            other = known & (taken[:, :, None] != chosen[:, None, :]).all(-1)
            self._other = self._other.to(other.device)
            self._other += torch.stack([other.sum(), known.sum()])
        weights = torch.softmax(logits, -1, dtype=torch.float).gather(-1, taken)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), taken


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
