"""A model to train, made ready on every rank: built without memory, cut, and filled with the rank's own rows.

Nobody holds the whole model: neither a rank's device nor its host. Where a checkpoint's names are not the model's (it
needs transformers' conversion), or it is no safetensors, each rank loads it whole on its host first, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from penstock.services.modeling import lora
from penstock.services.modeling.dtypes import HALVES
from penstock.services.modeling.files_beside import read_beside
from penstock.services.modeling.four_bit import FourBitLinear
from penstock.services.modeling.freezing import freeze_all
from penstock.services.modeling.load import (
    Head,
    ModelError,
    empty_model,
    folder_of,
    has_own_code,
    load_config,
    load_model,
)
from penstock.services.modeling.lora import Adapter
from penstock.services.modeling.parallel.fsdp import block_of, shard
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.towers import towers
from penstock.services.modeling.values import value_heads
from penstock.services.modeling.weight_files import WeightFiles

log = structlog.get_logger()


def load_trainable(
    path: str, world: World, device: torch.device, dtype: str, head: Head = "language",
    adapter: Adapter | None = None, offload: bool = False, key: str = "model.path", frozen: Sequence[str] = (),
    sight_learns: bool = False,
) -> Any:  # fmt: skip
    """The causal language model at ``path``, a folder or a hub name, which the config's ``key`` gives, in fp32, cut
    over ``world``, on ``device``; computes in ``dtype``; with ``offload`` its parameters lie on the host. With a
    "value" ``head``: that model with one output a token instead, which begins at 0 where the files have none. With an
    ``adapter`` that alone is to be trained, and such a head: what is frozen takes no more bits than are computed with.
    Towers are frozen (`modeling/towers.py`), unless its ``sight_learns``, and so is what has names like those in
    ``frozen`` (`modeling/freezing.py`). Raises `ModelError`, or a `SetupError` of these."""
    folder, own = folder_of(path, key), has_own_code(load_config(path, key))
    model, beside = empty_model(path, head, key), read_beside(folder, own)
    new = {name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")}
    new = new if head == "value" else set()
    with WeightFiles(folder, model) as files:
        missing = [name for name, _ in model.named_parameters() if name not in files and name not in new]
        if not missing and not own and _buffers_are_known(model, files, sight_learns):
            _prepare(model, adapter, path, dtype, frozen, sight_learns)
            shard(model, world, dtype, offload)
            _materialize(model, device, torch.device("cpu") if offload else device)
            _fill(model, files, f"{key}: {path}")
            return _begun(model, adapter, beside)
    why = "it has code of its own" if own else "the files lack what the model wants"
    log.warning(f"loaded whole on the host first: {why}", path=path, lacking=missing[:3])
    model = load_model(path, "float32", torch.device("cpu"), key, head)
    _prepare(model, adapter, path, dtype, frozen, sight_learns)
    shard(model, world, dtype, offload)
    if offload:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        return _begun(model, adapter, beside)
    return _begun(model.to(device), adapter, beside)


def _prepare(
    model: Any, adapter: Adapter | None, path: str, dtype: str, frozen: Sequence[str], sight_learns: bool
) -> None:
    freeze_all(model, frozen, sight_learns)
    if adapter is not None:
        if half := HALVES.get(dtype):
            whole = {id(parameter) for head in value_heads(model).values() for parameter in head.parameters()}
            for parameter in model.parameters():  # and no buffer: rotations are computed in fp32
                if id(parameter) not in whole:
                    parameter.data = parameter.data.to(half)
        lora.inject(model, adapter, path)


def _begun(model: Any, adapter: Adapter | None, beside: dict[str, bytes]) -> Any:
    if adapter is not None:
        lora.begin(model, adapter)
    model.penstock_beside = beside
    return model


def _buffers_are_known(model: Any, files: WeightFiles, sight_learns: bool) -> bool:
    """Each buffer is in the files, or is one that transformers computes from the config, or of a tower, where nothing
    is computed unless its ``sight_learns``."""
    still = [] if sight_learns else towers(model).values()
    unused = {id(module) for tower in still for module in tower.modules()}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            known = _is_computed(module) or (id(module) in unused and name in module._non_persistent_buffers_set)
            if f"{prefix}.{name}".lstrip(".") not in files and not known:
                log.warning("unknown buffer", name=f"{prefix}.{name}", shape=tuple(buffer.shape))
                return False
    return True


def _is_computed(module: nn.Module) -> bool:
    """Its buffers follow from the config: rotations, of Gemma 3 for each kind of layer, the factor of Gemma's
    embedding, and the places of a picture's patches."""
    rotations = "RotaryEmbedding" in type(module).__name__ and any("original_inv_freq" in name for name in dir(module))
    return rotations or hasattr(module, "scalar_embed_scale") or _counts_places(module)


def _counts_places(module: nn.Module) -> bool:
    return set(module._buffers) == {"position_ids"} == module._non_persistent_buffers_set


def _compute(model: Any, module: Any) -> None:
    if hasattr(module, "scalar_embed_scale"):  # transformers' own way would draw the embedding anew
        module.embed_scale.fill_(module.scalar_embed_scale)
    elif _counts_places(module):
        module.position_ids.copy_(torch.arange(module.position_ids.shape[-1]))
    else:
        model._init_weights(module)


def _materialize(model: Any, device: torch.device, place: torch.device) -> None:
    """Memory on ``place`` for each parameter's part, and on ``device`` for each buffer. What is tied stays tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(
                    torch.empty_like(parameter, device=place), requires_grad=parameter.requires_grad
                )
            setattr(module, name, made[id(parameter)])
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)


@torch.no_grad()
def _fill(model: Any, files: WeightFiles, given: str) -> None:
    """``given``: key and path of the model, for errors."""
    for full_name, parameter in model.named_parameters():
        name = lora.plain_name(full_name)
        if lora.is_adapters(name):
            continue
        if name not in files:  # a value head: no state is worth more than another yet
            parameter.zero_()
            continue
        _check_shape(files, name, parameter.shape, given)
        mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if mine.numel():
            block = block_of(parameter) if isinstance(parameter, DTensor) else _whole(mine)
            mine.copy_(files.block(name, block).to(mine.device))  # widened there: a host takes long for that
    for prefix, module in model.named_modules():
        if isinstance(module, FourBitLinear):
            name = lora.plain_name(f"{prefix}.weight")
            _check_shape(files, name, module.shape, given)
            module.take(files.block(name, (slice(None),)))
            continue
        for name, buffer in module.named_buffers(recurse=False):
            full = f"{prefix}.{name}".lstrip(".")
            if full in files:
                buffer.copy_(files.block(full, _whole(buffer)))
            elif _is_computed(module):
                _compute(model, module)


def _whole(tensor: torch.Tensor) -> tuple[slice, ...]:
    """All of it; of one without dimensions, too."""
    return (slice(None),) * tensor.ndim


def _check_shape(files: WeightFiles, name: str, shape: torch.Size, given: str) -> None:
    if files.shape(name) != tuple(shape):
        raise ModelError(f"{given}: {name} has shape {files.shape(name)}, the config.json makes it {tuple(shape)}")
