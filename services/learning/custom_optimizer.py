"""An optimizer of torch's, or of the user's own, by its name: what it keeps of each parameter is found by a trial.

optimizer: {type: custom, name: "torch.optim:NAdam", options: {momentum_decay: 0.01}}
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.plugins import describe, load_plugin

TRIED = (3, 5)
"""The shape of a parameter that it is tried with."""
OF_EACH = ("params", "lr", "weight_decay")
"""What groups of parameters have of the config."""


@dataclass(frozen=True)
class Kept:
    """What an optimizer keeps of each parameter, by name, once it has changed it."""

    shaped: tuple[str, ...]
    """fp32, of the parameter's shape."""
    numbers: tuple[str, ...]
    """One number each, in a tensor on the host."""
    plain: Mapping[str, type] = field(default_factory=dict)
    """Of the `numbers` those that are Python's, and what they are."""
    on_device: bool = False
    """Its numbers lie where parameters do."""

    def number(self, name: str, value: torch.Tensor) -> Any:
        """``value``, that was saved, as the optimizer has it."""
        return self.plain[name](value.item()) if name in self.plain else value


def kept_by(name: str, options: Mapping[str, Any], key: str) -> Kept:
    """What the class ``name`` keeps, made with ``options``; ``key`` is the config's section of it. Raises `SetupError`
    where it is no optimizer, or keeps what a checkpoint would not have."""
    return _kept_by(name, json.dumps(options, sort_keys=True), key)


@cache
def _kept_by(name: str, options: str, key: str) -> Kept:
    parameter = torch.nn.Parameter(torch.ones(TRIED))
    made = make(name, [{"params": [parameter]}], json.loads(options), 1e-3, key)
    for _ in range(2):
        before = _of_groups(made)
        parameter.grad = torch.ones(TRIED)
        try:
            with torch.random.fork_rng(devices=()):
                made.step()
        except Exception as error:  # the user's own code
            raise SetupError(f"{key}.name: {name} cannot change a parameter: {describe(error)}") from error
        if (now := _of_groups(made)) != before:
            changed = min(what for what in now if now[what] != before.get(what))
            raise SetupError(
                f"{key}.name: {name} keeps {changed!r} of all parameters together, which no checkpoint would have; "
                "take one whose state is that of each parameter"
            )
    shaped, numbers, plain = list[str](), list[str](), dict[str, type]()
    for what, value in made.state[parameter].items():
        if isinstance(value, torch.Tensor) and value.shape == TRIED and value.dtype == torch.float32:
            shaped.append(what)
        elif isinstance(value, torch.Tensor) and value.ndim == 0 and value.dtype == torch.float32:
            numbers.append(what)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers.append(what)
            plain[what] = type(value)
        elif value is not None:
            had = f"{list(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise SetupError(
                f"{key}.name: {name} keeps {what!r}, {had}, of a matrix {list(TRIED)}; only fp32 tensors of its own "
                "shape, and numbers, can be cut over ranks and saved; take another, or other options"
            )
    there = json.loads(options)
    return Kept(tuple(shaped), tuple(numbers), plain, bool(there.get("fused") or there.get("capturable")))


def make(
    name: str, groups: list[dict[str, Any]], options: Mapping[str, Any], lr: float, key: str
) -> torch.optim.Optimizer:
    """The class ``name`` for ``groups`` of parameters. Raises `SetupError`."""
    found = load_plugin(name, f"{key}.name")
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise SetupError(f"{key}.name: {name} is no class of torch.optim.Optimizer's; name one, e.g. torch.optim:NAdam")
    try:
        made = found(groups, lr=lr, **options)
    except Exception as error:  # the user's own code
        why = describe(error)
        raise SetupError(f"{key}.options: {name} cannot be made with them and a learning rate: {why}") from error
    if any(group.get("weight_decay") for group in groups) and "weight_decay" not in made.defaults:
        raise SetupError(f"{key}.weight_decay: {name} has none; leave it out")
    return made


def _of_groups(made: torch.optim.Optimizer) -> dict[str, Any]:
    """What it has of all parameters together."""
    return copy.deepcopy({what: value for what, value in made.param_groups[0].items() if what not in OF_EACH})
