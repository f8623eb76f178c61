"""A model's parameters, gradients and optimizer states cut over the ranks of a `World`: FSDP2, around what tensor
parallelism has cut."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from penstock.protocols.cut import rows_of
from penstock.services.modeling.dtypes import HALVES
from penstock.services.modeling.families import BOTH_WAYS
from penstock.services.modeling.load import sees
from penstock.services.modeling.logprobs import layout_of, statistics
from penstock.services.modeling.packing import Rows
from penstock.services.modeling.parallel.expert import deal_experts
from penstock.services.modeling.parallel.sequence import SequenceParallel
from penstock.services.modeling.parallel.stages import cut_stages, held_layers
from penstock.services.modeling.parallel.tensor import cut_layers
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.token_statistics import Statistic
from penstock.services.modeling.towers import decoder_of, tower_blocks, towers
from penstock.services.modeling.values import values
from penstock.services.runtime.errors import SetupError


def shard(model: Any, world: World, dtype: str, offload: bool = False) -> None:
    """Cuts ``model`` in place, as the shape of ``world`` says: each decoder layer a unit, each tower, and what remains.
    Each unit is cast to ``dtype`` as it is gathered, for as long as it is computed with; gradients are summed in fp32.
    A world of one that computes in fp32 has nothing to cut or cast. With ``offload`` what is cut lies on the host."""
    half = HALVES.get(dtype)
    model.penstock_half = half
    if world.size == 1 and not half and not offload:
        return
    if getattr(decoder_of(model), "layers", None) is None:
        raise SetupError(
            f"model.path: {model.config.model_type} has no list of layers to cut; use trainer.ranks=1 and "
            "model.dtype=float32"
        )
    cut_stages(model, world, half or torch.float32)
    cut_layers(model, world)
    experts = deal_experts(model, world)
    if group := world.sequence_group:
        check_shares_rows(model)
        model.penstock_ulysses = SequenceParallel(dist.get_rank(group), world.shape.sequence, group)
    policy = MixedPrecisionPolicy(half, torch.float32) if half else MixedPrecisionPolicy()
    # The model itself is given ids, masks, and teachers' log-probabilities, which are not to be rounded.
    as_given = replace(policy, cast_forward_inputs=False)
    place = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if offload else OffloadPolicy()
    # The loss is scaled for the whole step, so gradients are summed over the ranks, not averaged.
    meshes = dict.fromkeys(experts, world.expert_fsdp_mesh) if experts else {}
    blocks = [block for tower in towers(model).values() for block in tower_blocks(tower)]
    # A tower that stands still is never called, so it is never gathered.
    meshes |= dict.fromkeys([*held_layers(model), *blocks, *towers(model).values(), model], world.fsdp_mesh)
    uncast = {id(unit) for unit in (*blocks, model)}  # blocks are given the angles of patches, in fp32
    for unit, mesh in meshes.items():
        fully_shard(unit, mesh=mesh, mp_policy=as_given if id(unit) in uncast else policy, offload_policy=place)
    for unit, mesh in meshes.items():
        if mesh.size() > 1:  # of a single one the quotient would be a copy of the whole gradient
            unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
    # FSDP gathers a unit's parameters before its forward: the log-probabilities go around `forward`.
    for name, function in (("penstock_statistics", statistics), ("penstock_values", values)):
        setattr(model, name, types.MethodType(function, model))
        register_fsdp_forward_method(model, name)


def check_shares_rows(model: Any) -> None:
    """Raises `SetupError` where ranks cannot share rows of ``model`` between tokens."""
    if layout_of(model) in ("apart", "whole") or (sees(model.config) and model.config.model_type in BOTH_WAYS):
        raise SetupError(
            f"sequence_parallel: it cuts packed rows between their tokens, which {model.config.model_type} does not "
            "take; set it to 1"
        )


def forward(model: Any, rows: Rows, temperature: float) -> torch.Tensor:
    """`services.modeling.logprobs.logprobs`, for a model that may be cut."""
    return forward_statistics(model, rows, temperature, ("log_prob",))[0]


def forward_statistics(model: Any, rows: Rows, temperature: float, wanted: tuple[Statistic, ...]) -> torch.Tensor:
    """`services.modeling.logprobs.statistics`, for a model that may be cut."""
    own = getattr(model, "penstock_statistics", None)
    return own(rows, temperature, wanted) if own else statistics(model, rows, temperature, wanted)


def forward_values(model: Any, rows: Rows) -> torch.Tensor:
    """`services.modeling.values.values`, for a model that may be cut."""
    own = getattr(model, "penstock_values", None)
    return own(rows) if own else values(model, rows)


def keep_gathered(model: Any) -> None:
    """What is gathered for a forward stays for the backward that follows, also of the layers."""
    if isinstance(model, FSDPModule):
        model.set_reshard_after_forward(False)


def reshard(model: Any) -> None:
    """After a forward without a backward: the parameters that were gathered for it are cut again."""
    for unit in _units(model):
        unit.reshard()


def _units(model: Any) -> Iterator[FSDPModule]:
    yield from (module for module in model.modules() if isinstance(module, FSDPModule))


def forget_backward(model: Any) -> None:
    """After a backward that was broken off: what FSDP remembers of it would keep the next one from summing gradients.
    Nobody wants what it leaves in them, nor the sums of micro-batches before it that were not over the ranks yet."""
    if not isinstance(model, FSDPModule):
        return
    model._get_fsdp_state()._root_post_backward_final_callback()
    for unit in _units(model):
        unit.reshard()
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):  # once it was gathered
                    parameter._unsharded_param.grad = None


def sum_gradients(model: Any, now: bool, last: bool, keeps: bool) -> None:
    """Whether the coming backward sums gradients over the ranks. Where not, each rank keeps its whole own sum, in fp32,
    until one that does: the ``last`` of an update at the latest. Until that one a model that ``keeps`` what is gathered
    keeps it for the next forward, too."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now or last)
        model.set_reshard_after_backward(last or not keeps)
        # A stage has gone forward with other micro-batches already, whose backward is still to come.
        model.set_is_last_backward(last or not hasattr(model, "penstock_stage"))


def full(value: torch.Tensor) -> torch.Tensor:
    """The whole tensor, on every rank: all of them must ask."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """``whole``, cut as ``parameter`` is."""
    if not isinstance(parameter, DTensor):
        return whole.to(parameter.device)
    return of_local(parameter, whole[block_of(parameter)].contiguous().to(parameter.device))


def block_of(parameter: DTensor) -> tuple[slice, ...]:
    """Which part of the whole tensor this rank has."""
    sizes, firsts = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))


def first_row(value: torch.Tensor) -> int:
    """The number of the first row that this rank has."""
    if not isinstance(value, DTensor):
        return 0
    mesh, first, rows = value.device_mesh, 0, value.shape[0]
    how = dict(zip(mesh.mesh_dim_names or (), value.placements, strict=True))
    for name in ("expert", "tensor", "shard"):  # FSDP cuts last
        if name in how and getattr(how[name], "dim", None) == 0:  # FSDP's around tensor parallelism is no `Shard`
            more, rows = rows_of(rows, mesh.get_local_rank(name), mesh[name].size())
            first += more
    return first


def clip_gradients(parameters: Mapping[str, torch.nn.Parameter], world: World, bound: float) -> torch.Tensor:
    """Scales all gradients so that their norm over the whole model is at most ``bound``; returns what it was. What
    several ranks hold alike counts once."""
    if world.size == 1:
        return full(torch.nn.utils.clip_grad_norm_(parameters.values(), bound))
    every = [p for p in parameters.values() if p.grad is not None]  # none: nothing of the step has a reward
    total = torch.zeros((), dtype=torch.float64, device=next(iter(parameters.values())).device)
    for parameter in every:
        assert parameter.grad is not None
        total += squares(local(parameter.grad), parameter, world)
    norm = world.add(total).sqrt()
    scale = (bound / (norm + 1e-6)).clamp(max=1.0)
    for parameter in every:
        assert parameter.grad is not None
        local(parameter.grad).mul_(scale.to(parameter.grad.dtype))
    return norm


def squares(mine: torch.Tensor, whole: torch.Tensor, world: World) -> torch.Tensor:
    """float64: of ``mine``, this rank's part of something that is cut as ``whole``, its share in the sum of squares
    over all ranks."""
    return mine.float().norm().double().square() / _copies(whole, world)


def _copies(value: torch.Tensor, world: World) -> int:
    """How many ranks hold the same part."""
    held = world.breadth * getattr(value, "penstock_copies", 1)
    if not isinstance(value, DTensor):
        return held
    cut = [size for size, how in zip(value.device_mesh.shape, value.placements, strict=True) if not how.is_replicate()]
    return held // math.prod(cut)


def of_local(parameter: DTensor, mine: torch.Tensor, mesh: DeviceMesh | None = None) -> DTensor:
    """``mine``, this rank's part of what is cut as ``parameter`` is; on ``mesh``, where that is another."""
    return DTensor.from_local(
        mine,
        mesh or parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``parameter``, flat: elements in the order of the whole tensor."""
    if isinstance(parameter, DTensor):
        parameter = parameter.to_local()
    return parameter.detach().reshape(-1)
