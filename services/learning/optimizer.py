"""A learner's optimizer: AdamW, with its two moments in fp32, on its device or its host, or in 8 bits by torchao
(Dettmers et al. 2021); or Muon beside it; or one by its name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from penstock.services.learning.custom_optimizer import CPU, Kept, kept_by, make
from penstock.services.learning.eight_bit import in_fp32, is_quantized, quantize
from penstock.services.learning.host_moments import MOMENTS, HostAdamW
from penstock.services.learning.muon import MOMENTUM, Muon, hidden_matrices
from penstock.services.learning.optimizer_config import OptimizerConfig
from penstock.services.modeling.parallel.world import World

SIGNED = dict(zip(MOMENTS, (True, False), strict=True))
"""Moments that 8 bits may hold, and whether they have a sign."""


def make_optimizer(
    model: Any, parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig, world: World,
    on_host: bool = False, key: str = "trainer.optimizer",
) -> torch.optim.Optimizer:  # fmt: skip
    """For all of ``parameters``, of a ``model`` that is cut as ``world`` says. With ``on_host`` its means lie in host
    memory, and updates are computed where the parameters are. ``key`` is that of ``config``. Every rank calls it."""
    how: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}

    def adamw(groups: list[dict[str, Any]]) -> torch.optim.AdamW:
        if on_host:
            return HostAdamW(groups, world.device, **how)
        return torch.optim.AdamW(groups, **how, fused=True)

    if config.type == "muon":
        hidden = hidden_matrices(model, parameters)
        others = _groups({name: each for name, each in parameters.items() if each not in hidden}, config.weight_decay)
        return Muon(hidden, adamw(others) if others else None, config, world, on_host)
    groups = _groups(parameters, config.weight_decay)
    if config.type == "custom":
        assert config.name
        made = make(config.name, groups, config.options, config.lr, key)
        made.penstock_kept = kept_by(config, key, next(iter(parameters.values())).device if parameters else CPU)
        return made
    if config.moments == "float32":
        return adamw(groups)
    from torchao.optim import AdamW8bit

    found: torch.optim.Optimizer = AdamW8bit(groups, **how)
    return found


def custom(optimizer: torch.optim.Optimizer) -> Kept | None:
    """What one by its name keeps; None of any other."""
    return getattr(optimizer, "penstock_kept", None)


def is_eight_bit(optimizer: torch.optim.Optimizer) -> bool:
    """Its moments lie in 8 bits."""
    return not isinstance(optimizer, torch.optim.AdamW | Muon) and custom(optimizer) is None


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate from now on."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # torchao's, which is compiled into what uses it
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def stepping(optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
    """Around `step`: torchao compiles it, which on a CPU wants a C++ compiler and takes longer than it saves."""
    if kept := custom(optimizer):
        return kept.stepping()
    if not is_eight_bit(optimizer) or optimizer.param_groups[0]["params"][0].is_cuda:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # loads torch's compiler, which takes seconds


def local(value: torch.Tensor) -> torch.Tensor:
    """This rank's part of something in the optimizer's state; in fp32 where that is 8 bits."""
    mine = (value.to_local() if isinstance(value, DTensor) else value).detach()
    return in_fp32(mine) if is_quantized(mine) else mine


def state_names(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> tuple[str, ...]:
    """What the state of ``parameter`` consists of."""
    if kept := custom(optimizer):
        return kept.names
    hidden = isinstance(optimizer, Muon) and optimizer.is_hidden(parameter)
    return (MOMENTUM,) if hidden else ("step", *MOMENTS)


def keeps_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Its means lie where parameters do, in fp32."""
    on_host = isinstance(optimizer, HostAdamW) or (isinstance(optimizer, Muon) and optimizer.on_host)
    return not on_host and not is_eight_bit(optimizer)


def restore_state(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, state: Mapping[str, torch.Tensor]
) -> None:
    """Takes the ``state`` of a ``parameter``, in fp32 and cut as it is, over. One that was saved from 8 bits becomes
    the same 8 bits again where it is cut as it was."""
    found: dict[str, Any] = dict(state)
    if kept := custom(optimizer):
        found |= {name: kind(found[name].item()) for name, kind in kept.plain.items()}
    elif is_eight_bit(optimizer):
        for name, signed in SIGNED.items():
            found[name] = optimizer._new_buffer(parameter, signed)
            mine = found[name].to_local() if isinstance(found[name], DTensor) else found[name]
            saved = local(state[name]).to(mine.device)  # that came by the host
            quantize(saved, mine) if is_quantized(mine) else mine.copy_(saved)
        found["step"] = state["step"].cpu()
    elif not keeps_on_device(optimizer):
        assert isinstance(optimizer, HostAdamW | Muon)
        found |= optimizer.placed(parameter, state)
    optimizer.state[parameter] = found


def _groups(parameters: Mapping[str, torch.nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """Matrices, which decay, and vectors, which do not, experts' biases among them, which lie together; of each, what
    is cut over the same ranks is changed in one go."""
    found: dict[tuple[bool, Any], list[torch.nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decays = parameter.ndim > 1 and not name.endswith("bias")
        found.setdefault((decays, getattr(parameter, "device_mesh", None)), []).append(parameter)
    return [{"params": some, "weight_decay": decay if decays else 0.0} for (decays, _), some in found.items()]
