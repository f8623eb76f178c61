"""Tensor parallelism: a layer's matrices cut over ranks that compute it together, by the plan of the model's family.

    every rank:  h ─▶ [q k v | gate up]  own rows: own heads, own part of the width
                      [o | down]         own columns: a part of each sum ─▶ all-reduce ─▶ h

The plan is transformers' (``base_model_tp_plan``), the mechanics are torch's. Embeddings, norms and the head are whole
on every rank of a layer's. Norms of single heads see the rank's own heads alone: their gradients are parts, which are
summed before an update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from penstock.protocols.cut import rows_of
from penstock.services.modeling.parallel.stages import held_layers
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime.errors import SetupError

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # What reads all of it, such as a norm over all heads, or takes it apart otherwise, is computed by every rank.
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""What transformers calls a way to cut a matrix, and torch's for it."""
AS = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe", "glm4_moe_lite": "deepseek_v3"}
"""Families of which transformers has no plan, or another, each with one whose layers are the same."""
PARTIAL = "replicated_with_grad_allreduce"
"""What transformers calls a parameter whose gradient on each rank is a part."""


def cut_layers(model: Any, world: World) -> None:
    """Cuts ``model`` in place over the ranks of ``world`` that share a layer, before FSDP cuts what is left."""
    size, config = world.shape.tensor, model.config.get_text_config()
    if size == 1:
        return
    whole = _plan_of(config)
    # Embeddings stay whole, and experts, which are dealt out.
    plan = {name: style for name, style in whole.items() if name.startswith("layers.") and ".experts" not in name}
    if odd := sorted(set(plan.values()) - STYLES.keys() - {PARTIAL}) or ([] if plan else ["nothing"]):
        raise SetupError(
            f"tensor_parallel: transformers' plan for {config.model_type} says {odd[0]}, which is not known "
            "here; set it to 1"
        )
    named = {name.removeprefix("layers.*."): style for name, style in plan.items() if style in STYLES}
    for layer in held_layers(model):
        _check_even(size, _features(layer, named))
        styles = {name: STYLES[style]() for name, style in named.items()}
        parallelize_module(layer, world.tensor_mesh, styles, src_data_rank=None)
    parts = {name.rpartition(".")[2] for name, style in plan.items() if style == PARTIAL}
    if named.get("self_attn.q_proj") == "colwise":
        parts |= {"q_norm", "k_norm"}  # of single heads, in whatever families have them
    mine = {id(parameter) for layer in held_layers(model) for parameter in layer.parameters()}
    every = [name for name, parameter in model.named_parameters() if id(parameter) in mine]
    model.penstock_partial = [name for name in every if name.split(".")[-2] in parts]


def _plan_of(config: Any) -> dict[str, str]:
    known = CONFIG_MAPPING[AS[config.model_type]] if config.model_type in AS else config
    return getattr(known, "base_model_tp_plan", None) or {}


def _features(layer: nn.Module, named: Mapping[str, str]) -> dict[str, int]:
    """What is cut of the matrices of ``layer`` that are ``named``, each with how."""
    found: dict[str, int] = {}
    for name, module in layer.named_modules():
        if name in named and isinstance(module, nn.Linear):
            by_rows = named[name].startswith("colwise")
            found[f"features of {name}"] = module.out_features if by_rows else module.in_features
            size = getattr(layer.get_submodule(name.rpartition(".")[0]), "head_dim", None)
            if size and name.endswith(("q_proj", "k_proj", "v_proj")) and named[name] == "colwise":
                found[f"heads of {name}"] = module.out_features // size
    return found


def _check_even(size: int, counts: Mapping[str, int]) -> None:
    for what, count in counts.items():
        if count % size:
            raise SetupError(f"tensor_parallel={size}: {count} {what} cannot be cut into as many parts")


def sum_partial(model: Any, parameters: dict[str, torch.nn.Parameter], world: World) -> None:
    """Gradients of which each rank of a layer has a part become whole."""
    for name in getattr(model, "penstock_partial", ()):
        gradient = parameters[name].grad if name in parameters else None  # of what stands still there is none
        if gradient is not None:
            mine = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(mine, group=world.tensor_mesh.get_group())


class Turned:
    """A matrix that is cut by columns, as rows: those that this rank sends of it. They change when they are gathered,
    and not between: who publishes them may read while the next step is computed."""

    def __init__(self, parameter: DTensor, world: World) -> None:
        self._parameter, self._world = parameter, world
        self.shape, self.device = parameter.shape, parameter.device
        shard = world.rank // world.shape.tensor % world.shards
        self._first, self._count = rows_of(parameter.shape[0], shard, world.shards)
        self.gather()

    @property
    def first(self) -> int:
        """The number of its first row."""
        return self._first + self._share(self._world.rank % self._world.shape.tensor)[0]

    @torch.no_grad()
    def gather(self) -> None:
        """Every rank that shares the matrix gives the others their rows: to be called by all of them, when it has
        changed."""
        mesh = self._world.tensor_mesh
        mine = self._parameter.to_local().detach()
        size, columns = mesh.size(), mine.shape[1]
        counts = [self._share(place)[1] for place in range(size)]
        own = counts[mesh.get_local_rank()]
        found = mine.new_empty(size * own * columns)
        dist.all_to_all_single(
            found, mine.reshape(-1), [own * columns] * size, [count * columns for count in counts],
            group=mesh.get_group(),
        )  # fmt: skip
        self._rows = found.view(size, own, columns).transpose(0, 1).reshape(-1)

    def local(self) -> torch.Tensor:
        """Flat: elements in the order of the whole matrix, from row `first` on."""
        return self._rows

    def _share(self, place: int) -> tuple[int, int]:
        return rows_of(self._count, place, self._world.shape.tensor)


def is_turned(parameter: torch.Tensor) -> bool:
    """It is cut by columns."""
    return isinstance(parameter, DTensor) and any(isinstance(p, Shard) and p.dim > 0 for p in parameter.placements)
