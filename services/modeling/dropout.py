"""Dropout, and other chance in a model: what the rollout sampled without it is not judged with it."""

from __future__ import annotations

from typing import Any


def without_dropout(model: Any) -> None:
    """Sets every probability of dropout in ``model``, by whatever name its family has it, to 0: those of modules, and
    those of its config, which some families read as they compute. A router that would jitter routes as engines do."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for holder in (*model.modules(), *configs.values()):
        for name, value in vars(holder).items():
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(holder, name, 0.0)
    for module in model.modules():  # not 0: PhiMoE's also says which experts are close enough, and that in engines too
        if any("jitter" in name for name in vars(module)):
            module.eval()
