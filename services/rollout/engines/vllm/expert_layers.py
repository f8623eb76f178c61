"""Loads all experts of a layer into vLLM at once. By itself it takes them matrix by matrix and looks the whole layer
over for each: some 0.4 ms of Python, and Qwen3-30B-A3B has 18,432 of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader

from penstock.services.modeling.experts import EXPERTS, is_experts
from penstock.services.modeling.families import IN_MATRICES, TURNED

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")
_OWN = ("w13_weight", "w2_weight")
"""What vLLM calls `EXPERTS`."""


def load_whole_layers(
    model: torch.nn.Module, model_type: str, weights: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Fills what it can of vLLM's ``model``, a layerwise reload of which has begun. Returns the weights that are left
    for vLLM's own loader, and the names of vLLM's parameters that are full."""
    rest, filled = dict(weights), set[str]()
    if model_type not in IN_MATRICES | TURNED:
        return rest, filled
    layers: dict[int, dict[str, str]] = {}
    for name, weight in weights.items():
        if is_experts(name, weight) and (match := _LAYER.fullmatch(name)):
            layers.setdefault(int(match[1]), {})[name.rpartition(".")[2]] = name
    for path, module in model.named_modules():
        match = _LAYER.fullmatch(path)
        if not match or not isinstance(module, RoutedExperts):
            continue
        names = layers.get(int(match[1]), {})
        if len(names) == len(EXPERTS) and _load(module, *(weights[names[part]] for part in EXPERTS)):
            filled |= {f"{path.replace('.base_layer', '')}.{own}" for own in _OWN}  # as LoRA wraps it
            for name in names.values():
                del rest[name]
    return rest, filled


def _load(module: RoutedExperts, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Puts ``gate_up`` ``[experts, 2 * width, hidden]`` and ``down`` ``[experts, hidden, width]`` into this worker's
    part of a layer; false, and nothing is done, where vLLM keeps that in another way: padded, quantized, or doubled."""
    experts, config = _local(module, len(down)), module.moe_config
    hidden, whole_width = down.shape[1:]
    size = config.moe_parallel_config.tp_size
    width = whole_width // size
    plain = isinstance(module.quant_method, UnquantizedFusedMoEMethod) and config.is_act_and_mul
    if experts is None or not plain or whole_width % size or gate_up.shape[1:] != (2 * whole_width, hidden):
        return False
    shapes = [(len(down[experts]), 2 * width, hidden), (len(down[experts]), hidden, width)]
    if dict(zip(_OWN, shapes, strict=True)) != {name: tuple(own.shape) for name, own in module.named_parameters()}:
        return False
    start = config.tp_rank * width

    def load_gate_up(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        if size == 1:
            param.data.copy_(loaded_weight)
            return
        for own, whole in zip(param.data.chunk(2, 1), loaded_weight.chunk(2, 1), strict=True):
            own.copy_(whole.narrow(1, start, width))

    def load_down(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight.narrow(2, start, width))

    loaders: tuple[Callable[[torch.Tensor, torch.Tensor], None], ...] = load_gate_up, load_down
    params = [getattr(module, own) for own in _OWN]
    before = [param.weight_loader for param in params]
    for own, param, loader in zip(_OWN, params, loaders, strict=True):
        param.weight_loader = loader
        # So that vLLM brings the layer into its kernels' form once it is full.
        param.weight_loader = make_online_process_loader(module, own)
    for param, whole in zip(params, (gate_up, down), strict=True):
        param.weight_loader(param, whole[experts])
    for param, loader in zip(params, before, strict=True):  # for who loads from files
        param.weight_loader = loader
    return True


def _local(module: RoutedExperts, number: int) -> slice | None:
    """Which of the experts this worker has; none: not in a way that a slice can say."""
    config, places = module.moe_config, module.expert_map_manager
    if config.num_logical_experts != number or config.num_experts != number:
        return None  # some are doubled, to share their load
    if module.local_num_experts == number:
        return slice(number)
    here = list(map(places.map_global_to_local, range(number)))
    own = [expert for expert, place in enumerate(here) if place >= 0]
    step = own[1] - own[0] if len(own) > 1 else 1
    found = slice(own[0], own[-1] + 1, step)
    return found if [here[expert] for expert in range(number)[found]] == list(range(len(own))) else None
