"""An optimizer of torch's, or of the user's own, by its name: what it keeps of each parameter is found by a trial.

optimizer: {type: custom, name: "torch.optim:NAdam", options: {momentum_decay: 0.01}}
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from penstock.services.learning.optimizer_config import OptimizerConfig
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.plugins import UserCodeError, describe, load_plugin

TRIED = ((64, 65), (33,))
"""Shapes of the parameters that it is tried with: a matrix of more numbers than others begin to keep otherwise at, and
a vector."""
STEPS = 6
OF_EACH = ("params", "lr", "weight_decay")
"""What groups of parameters have of the config."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kept:
    """What an optimizer keeps of each parameter, by name, once it has changed it."""

    who: str
    """It, and the config's key that names it."""
    shaped: tuple[str, ...] = ()
    """fp32, of the parameter's shape."""
    numbers: tuple[str, ...] = ()
    """fp32, one each."""
    on_device: frozenset[str] = frozenset()
    """Those `numbers` that lie where the parameter does; others are on the host."""
    plain: Mapping[str, type] = field(default_factory=dict)
    """Numbers of Python's, and what they are."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all."""
        return (*self.plain, *self.numbers, *self.shaped)

    def check(self, name: str, parameter: torch.Tensor, state: Mapping[str, Any], beside: str) -> None:
        """Raises `SetupError` where the ``state`` of the parameter ``name`` is not what the trial has found, but for
        what others keep ``beside`` it."""
        for what, value in state.items():
            if what == beside or value is None:
                continue
            shape = parameter.shape if what in self.shaped else ()
            fits = what in (*self.shaped, *self.numbers) and _like(value, shape)
            if not fits and not (what in self.plain and isinstance(value, self.plain[what])):
                had = f"{what!r} of {name}, {_described(value)}"
                raise SetupError(f"{self.who} keeps {had}, as it did not in its trial, and no checkpoint would have it")

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """What it raises inside names it."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the user's own code
            raise UserCodeError(f"{self.who} raised {describe(error)}") from error


def kept_by(config: OptimizerConfig, key: str, device: torch.device = CPU) -> Kept:
    """What the class that ``config`` names keeps, of parameters on ``device``; ``key`` is the config's of it. Raises
    `SetupError` where it is no optimizer, or keeps what a checkpoint would not have."""
    return _kept_by(str(config.name), json.dumps(config.options, sort_keys=True), config.weight_decay, key, device)


@cache
def _kept_by(name: str, options: str, decay: float, key: str, device: torch.device) -> Kept:
    parameters = [torch.nn.Parameter(torch.ones(shape, device=device)) for shape in TRIED]
    groups = [{"params": [one], "weight_decay": share} for one, share in zip(parameters, (decay, 0.0), strict=True)]
    made = make(name, groups, json.loads(options), 1e-3, key)
    before = _together(made, parameters)
    for step in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1.0 + step)
        try:
            with torch.random.fork_rng(devices=()):
                made.step()
        except Exception as error:  # the user's own code
            raise SetupError(f"{key}.name: {name} cannot change a parameter: {describe(error)}") from error
    if (now := _together(made, parameters)) != before:
        changed = min(what for what in now if now[what] != before.get(what))
        raise SetupError(
            f"{key}.name: {name} keeps {changed!r} of all parameters together, which no checkpoint would have; take "
            "one whose state is that of each parameter"
        )
    found = [_of_one(made.state.get(parameter, {}), parameter, name, key) for parameter in parameters]
    if found[0] != found[1]:
        raise SetupError(f"{key}.name: {name} keeps other things of a matrix than of a vector; take another")
    return found[0]


def _of_one(state: Mapping[str, Any], parameter: torch.Tensor, name: str, key: str) -> Kept:
    shaped, numbers, on_device, plain = list[str](), list[str](), set[str](), dict[str, type]()
    for what, value in state.items():
        if _like(value, parameter.shape):
            shaped.append(what)
        elif _like(value, ()):
            numbers.append(what)
            on_device |= {what} if value.device.type != "cpu" else set()
        elif isinstance(value, int | float) and not isinstance(value, bool):
            plain[what] = type(value)
        elif value is not None:
            raise SetupError(
                f"{key}.name: {name} keeps {what!r}, {_described(value)}, of a parameter {list(parameter.shape)}; only "
                "fp32 tensors of its own shape, and numbers, can be cut over ranks and saved; take another, or other "
                "options"
            )
    who = f"{key}.name: {name}"
    return Kept(who, tuple(sorted(shaped)), tuple(sorted(numbers)), frozenset(on_device), plain)


def make(
    name: str, groups: list[dict[str, Any]], options: Mapping[str, Any], lr: float, key: str
) -> torch.optim.Optimizer:
    """The class ``name`` for ``groups`` of parameters. Raises `SetupError`."""
    found = load_plugin(name, f"{key}.name")
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise SetupError(f"{key}.name: {name} is no class of torch.optim.Optimizer's; name one, e.g. torch.optim:NAdam")
    if taken := {"lr", "weight_decay"} & options.keys():
        raise SetupError(f"{key}.options: {min(taken)} is a key of its own; set {key}.{min(taken)}")
    try:
        made = found(groups, lr=lr, **options)
    except Exception as error:  # the user's own code
        why = describe(error)
        raise SetupError(f"{key}.options: {name} cannot be made with them and a learning rate: {why}") from error
    if any(group.get("weight_decay") for group in groups) and "weight_decay" not in made.defaults:
        raise SetupError(f"{key}.weight_decay: {name} has none; leave it out")
    return made


def _together(made: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> dict[str, Any]:
    """What it has of all parameters together: in groups, beside their own state, or as numbers of its own."""
    found = {what: value for what, value in made.param_groups[0].items() if what not in OF_EACH}
    found |= {str(what): "" for what in made.state if all(what is not one for one in parameters)}
    found |= {what: value for what, value in vars(made).items() if isinstance(value, int | float)}
    return copy.deepcopy(found)


def _like(value: Any, shape: tuple[int, ...]) -> bool:
    """It is a tensor of fp32 and of this ``shape``."""
    return isinstance(value, torch.Tensor) and value.shape == shape and value.dtype == torch.float32


def _described(value: Any) -> str:
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
