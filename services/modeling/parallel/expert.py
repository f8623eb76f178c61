"""Expert parallelism: the experts of a layer dealt over ranks, to which the tokens go that chose them.

    rank 0:  own tokens ─▶ router ─▶ all-to-all ─▶ experts 0..3 ─▶ all-to-all ─▶ weighed and summed ─▶ own tokens
    rank 1:  own tokens ─▶ router ─▶ all-to-all ─▶ experts 4..7 ─▶ all-to-all ─▶ weighed and summed ─▶ own tokens

The ranks have micro-batches of their own, as with FSDP alone; of a layer's experts each gathers no more than its own
part. Lepikhin et al. 2020, arXiv:2006.16668. Router and experts are transformers', and so is the kernel that computes
the experts of a rank.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from penstock.services.modeling.experts import EXPERTS
from penstock.services.modeling.families import MIXTURES
from penstock.services.modeling.parallel.exchange import exchange
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime.errors import SetupError


def deal_experts(model: Any, world: World) -> list[nn.Module]:
    """Deals the experts of each of ``model``'s layers over the ranks of ``world`` that share them, in place. Returns
    what has to be a unit of FSDP's by itself, over the mesh that is left. Raises `SetupError` where it cannot."""
    size = world.shape.expert
    if size == 1:
        return []
    found, stage = list(_experts_of(model)), getattr(model, "penstock_stage", None)
    if not (found or stage) or model.config.model_type not in MIXTURES:
        raise SetupError(
            f"expert_parallel={size}: {model.config.model_type} is no mixture of experts that is known; set it to 1"
        )
    if uneven := [experts.num_experts for experts in found if experts.num_experts % size]:
        raise SetupError(f"expert_parallel={size}: {uneven[0]} experts cannot be dealt out to as many ranks")
    mesh = world.expert_mesh["expert"]  # made by all ranks at once, also of a pipeline's stage without experts
    world.on_hosts(mesh)
    for experts in found:
        for name in _of_each(experts):
            parameter = getattr(experts, name)
            cut = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        experts.penstock_group = mesh.get_group()
        experts.forward = types.MethodType(_forward, experts)
    return found


def _experts_of(model: Any) -> Iterator[nn.Module]:
    for module in model.modules():
        if all(isinstance(module._parameters.get(name), nn.Parameter) for name in EXPERTS):
            yield module


def _of_each(experts: nn.Module) -> list[str]:
    """Names of its parameters, whose first numbers are the experts'."""
    return [name for name, parameter in experts._parameters.items() if parameter is not None]


class _Here:
    """A layer's experts as transformers' kernels see them: this rank's alone."""

    _is_expert_parallel = False  # no row comes here but for an expert that is here

    def __init__(self, experts: nn.Module) -> None:
        self._experts = experts
        for name in _of_each(experts):
            whole = getattr(experts, name)
            setattr(self, name, whole.to_local() if isinstance(whole, DTensor) else whole)
        self.num_experts = len(getattr(self, EXPERTS[0]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


def _forward(self: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """For ``hidden`` ``[tokens, size]``, of which each has ``chosen`` ``[tokens, k]`` experts, with these ``weights``
    ``[tokens, k]``: the weighted sum of what they give."""
    group, here, places = self.penstock_group, _Here(self), chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)  # by expert, and so by rank
    theirs, sent, received = _traffic(chosen.flatten(), self.num_experts, group)
    rows = exchange(hidden[order // places], group, sent, received)
    every = torch.arange(here.num_experts, device=rows.device).repeat(len(sent))
    numbers = every.repeat_interleave(theirs, output_size=len(rows))
    found = exchange(_compute(here, rows, numbers), group, received, sent)
    weighed = found * weights.flatten()[order, None].to(found.dtype)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return weighed[back].view(-1, places, hidden.shape[1]).sum(1).to(hidden.dtype)


def _traffic(chosen: torch.Tensor, experts: int, group: Any) -> tuple[torch.Tensor, list[int], list[int]]:
    """How many rows come for each of this rank's experts from each rank (int64 ``[ranks * own experts]``); how many go
    to each rank, and come from it."""
    counts = torch.bincount(chosen, minlength=experts)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    sent, received = torch.stack([counts, theirs]).view(2, dist.get_world_size(group), -1).sum(-1).tolist()
    return theirs, sent, received


def _compute(here: _Here, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """What the expert with the ``numbers`` ``[rows]`` of this rank's gives for each of ``rows`` ``[rows, size]``."""
    none = not len(rows)
    if none:  # every rank's gradients are summed, also of experts that nobody chose
        rows, numbers = F.pad(rows, (0, 0, 0, 1)), F.pad(numbers, (0, 1))
    ones = torch.ones((len(rows), 1), dtype=rows.dtype, device=rows.device)
    found: torch.Tensor = type(here._experts).forward(here, rows, numbers[:, None], ones)
    return found[:0] if none else found
