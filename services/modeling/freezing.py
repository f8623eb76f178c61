"""Parameters that stand still while the others learn, by their names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import filter as matching
from typing import Any

from penstock.services.modeling.towers import freeze_towers
from penstock.services.runtime.errors import SetupError

SHOWN = 4


def freeze_all(model: Any, patterns: Sequence[str], sight_learns: bool) -> None:
    """What stands still in a run: as `freeze`, and the towers unless the model's ``sight_learns``."""
    if not sight_learns:
        freeze_towers(model)
    freeze(model, patterns)


def freeze(model: Any, patterns: Sequence[str]) -> None:
    """Those of the whole ``model``, of transformers, whose names are like one of ``patterns`` (of a shell: ``*`` is any
    text). They have no gradient and no optimizer's state, and are in versions and checkpoints as they came. Raises
    `SetupError` where a pattern fits none, or nothing is left."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not (found := matching(names, pattern)):
            said = ", ".join(names[:: max(1, len(names) // SHOWN)][:SHOWN])
            raise SetupError(f"trainer.freeze: no parameter is called like {pattern!r}; they have names like {said}")
        for name in found:
            model.get_parameter(name).requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise SetupError("trainer.freeze: nothing is left that could learn; name fewer")
