"""Pipeline parallelism: runs of a model's layers on ranks of their own, which hand each micro-batch on.

    stage 0:  embedding, layers 0..13         F0 F1    B0 F2    B1 F3    B2    B3
    stage 1:  layers 14..27, norm and head       F0 B0    F1 B1    F2 B2 F3 B3

Each stage goes through the same code as a whole model does: what it hands on is, for autograd, a function whose
gradient comes from the next stage, and what it is given one whose gradient goes to the stage before. A stage that is
not the last has no head: in place of what tokens are worth it gives zeros, whose loss nobody counts, and whose backward
waits for the real gradient. It goes forward through as many micro-batches ahead of its backward as there are stages
behind it (1F1B, Narayanan et al. 2021, arXiv:2104.04473): `ahead`.

Hidden states and gradients travel over groups of their own: on one, a send that waits for its receiver could stand
before the receive that this one waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from penstock.services.modeling.families import STAGED
from penstock.services.modeling.parallel.stage_layers import stage_layers
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.towers import decoder_of
from penstock.services.runtime.errors import SetupError

T = TypeVar("T")


class Stage:
    """This rank's stage of a model that computes in ``dtype`` with ``hidden`` numbers a token."""

    def __init__(self, world: World, hidden: int, dtype: torch.dtype, names: Mapping[str, int], tied: str) -> None:
        self.first, self.last = world.stage == 0, world.last_stage
        self.names = names
        """Of all the model's parameters: how many numbers each has."""
        self._tied = tied
        """The embedding's name, where it is the head too: first and last stage both have it."""
        self._before, self._behind = world.rank - world.breadth, world.rank + world.breadth
        self._states, self._gradients = world.column_group(), world.column_group()
        ends = ((place, world.size - world.breadth + place) for place in range(world.breadth))
        self._ends = world.group_among(ends) if tied else None
        self._hidden, self._dtype, self._device = hidden, dtype, world.device
        self._anchor = torch.zeros((), device=world.device, requires_grad=True)
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._most = world.shape.stages
        if world.device.type == "cuda":
            self._meet()

    def _meet(self) -> None:
        """Makes the connections of both groups: NCCL would make those of gradients while a state is on its way, whose
        kernel ends only once the next stage, which makes them too, has taken it."""
        one = torch.zeros(1, device=self._device)
        ways = ((self._states, self._before, self._behind), (self._gradients, self._behind, self._before))
        for number, (group, of, to) in enumerate(ways):
            first, last = (self.first, self.last) if number == 0 else (self.last, self.first)
            if not first:
                dist.recv(one, of, group=group)
            if not last:
                dist.send(one, to, group=group)
        torch.cuda.synchronize(self._device)

    def take_up(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What the base model is called with: of ``inputs``, with what the stage before has sent for their tokens."""
        if self.first:
            return inputs
        tokens: torch.Tensor = inputs["input_ids"]
        found = _TakeUp.apply(self._anchor, self, tuple(tokens.shape))
        return {name: value for name, value in inputs.items() if name != "input_ids"} | {"inputs_embeds": found}

    def hand_on(self, hidden: torch.Tensor, which: int, places: int) -> torch.Tensor:
        """Sends ``hidden`` on. Returns zeros ``[which, places]`` in place of what only the last stage knows; their
        backward takes up the gradient."""
        found: torch.Tensor = _HandOn.apply(hidden, self._anchor, self, (which, places))
        return found

    def mark(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Of the model's ``parameters`` those that another stage has as well know it."""
        if self._tied in parameters:
            parameters[self._tied].penstock_copies = 2

    def sum_tied(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """The gradient of an embedding that is the head too is of both: every rank calls it, once it is whole."""
        gradient = parameters[self._tied].grad if self._tied in parameters else None
        if gradient is not None:
            dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=self._ends)

    def settle(self) -> None:
        """What was sent has arrived, and is not kept any longer."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _send(self, value: torch.Tensor, to: int, group: Any) -> None:
        while self._sent and (len(self._sent) >= self._most or self._sent[0][0].is_completed()):
            self._sent.popleft()[0].wait()
        value = value.detach().to(self._dtype).contiguous()
        self._sent.append((dist.isend(value, to, group=group), value))

    def _receive(self, shape: tuple[int, ...], of: int, group: Any) -> torch.Tensor:
        value = torch.empty((*shape, self._hidden), dtype=self._dtype, device=self._device)
        dist.recv(value, of, group=group)
        return value


class _TakeUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, stage: Stage, shape: tuple[int, ...]) -> torch.Tensor:
        ctx.stage = stage
        return stage._receive(shape, stage._before, stage._states)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        stage: Stage = ctx.stage
        stage._send(gradients[0], stage._before, stage._gradients)
        return None, None, None


class _HandOn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, anchor: torch.Tensor, stage: Stage, shape: tuple[int, int]
    ) -> torch.Tensor:
        ctx.stage, ctx.shape, ctx.dtype = stage, hidden.shape, hidden.dtype
        stage._send(hidden, stage._behind, stage._states)
        return torch.zeros(shape, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        stage: Stage = ctx.stage
        found = stage._receive(tuple(ctx.shape[:-1]), stage._behind, stage._gradients)
        return found.to(ctx.dtype), None, None, None


class _Elsewhere(nn.Module):
    """In the place of what another stage has."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``hidden``, as it is."""
        return hidden


def cut_stages(model: Any, world: World, dtype: torch.dtype) -> None:
    """Leaves of ``model``, in place, what this rank's stage has; the names stay. Raises `SetupError`."""
    count, config = world.shape.stages, model.config.get_text_config()
    if count == 1:
        return
    if model.config.model_type not in STAGED:
        raise SetupError(
            f"pipeline_parallel={count}: it is not known whether {model.config.model_type} can be cut into stages; set "
            f"it to 1 (known are {', '.join(sorted(STAGED))})"
        )
    if count > len(model.base_model.layers):
        raise SetupError(f"pipeline_parallel={count}: the model has {len(model.base_model.layers)} layers; take fewer")
    base, names = model.base_model, {name: parameter.numel() for name, parameter in model.named_parameters()}
    embedding, head = base.embed_tokens, model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    name = next(name for name, parameter in model.named_parameters() if parameter is embedding.weight)
    stage = Stage(world, config.hidden_size, dtype, names, name if tied else "")
    first, end = stage_layers(len(base.layers), count)[world.stage]
    for number in range(len(base.layers)):
        if not first <= number < end:
            base.layers[number] = _Elsewhere()
    if not stage.first and not (tied and stage.last):
        base.embed_tokens = _Elsewhere()
    if not stage.last:
        base.norm = _Elsewhere()
        for name, child in list(model.named_children()):
            if child is not base and not (tied and stage.first):
                setattr(model, name, _Elsewhere())
    if not any(parameter.requires_grad for parameter in model.parameters()):
        adapts = getattr(model, "penstock_adapter_key", None)
        key = f"{adapts}.targets has" if adapts else "trainer.freeze leaves"
        raise SetupError(
            f"pipeline_parallel={count}: {key} nothing in layers {first} to {end - 1}, which are a stage; name others, "
            "or set it to 1"
        )
    model.penstock_stage = stage


def held_layers(model: Any) -> list[nn.Module]:
    """The decoder layers that this rank's stage has: all of them, where there is one stage."""
    return [layer for layer in decoder_of(model).layers if not isinstance(layer, _Elsewhere)]


def ahead(items: Iterable[T], count: int) -> Iterator[T]:
    """``items``, of which ``count`` are made before the first one is given out, and then one for each."""
    made: deque[T] = deque()
    for item in items:
        made.append(item)
        if len(made) > count:
            yield made.popleft()
    yield from made
