"""A model's config.json: on this machine, or among those of the shipped configs. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.pipeline.config import Config, ConfigError, PretrainedModel, TinyModel
from penstock.services.runtime import own_positions

SHIPPED = Path(__file__).parent / "models"
"""Of models that the shipped configs name, so that planning needs no hub: ORGANISATION--NAME/config.json."""


def find_config(config: Config, model: str | None = None) -> Path | None:
    """The file of the ``model``, a folder or a name on the hub; None: of the policy. None where it is on the hub alone,
    or the policy is the tiny one."""
    if model is None:
        if isinstance(config.model, TinyModel):
            return None
        model = config.model.path
    for path in (Path(model) / "config.json", SHIPPED / model.replace("/", "--") / "config.json"):
        if path.is_file():
            return path
    return None


def config_file(config: Config, model: str | None = None) -> Path:
    """As `find_config`. Raises `ConfigError` where there is none."""
    found = find_config(config, model)
    if found is None:
        raise ConfigError(f"{model or 'model.path'}: no config.json of it on this machine; give a folder that has one")
    return found


def read_config(config: Config, model: str | None = None) -> dict[str, Any] | None:
    """What the file says, as `find_config`."""
    path = find_config(config, model)
    if model is None and isinstance(config.model, PretrainedModel):
        model = config.model.path
    return own_positions.applied(model or "", json.loads(path.read_text())) if path else None
