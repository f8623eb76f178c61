"""A model's config.json: on this machine, or among those of the shipped configs. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.pipeline.config import Config, ConfigError, TinyModel

SHIPPED = Path(__file__).parent / "models"
"""Of models that the shipped configs name, so that planning needs no hub: ORGANISATION--NAME/config.json."""


def find_config(config: Config) -> Path | None:
    """The file; None where it is on the hub alone, or the model is the tiny one."""
    if isinstance(config.model, TinyModel):
        return None
    model = config.model.path
    for path in (Path(model) / "config.json", SHIPPED / model.replace("/", "--") / "config.json"):
        if path.is_file():
            return path
    return None


def config_file(config: Config) -> Path:
    """The file. Raises `ConfigError` where there is none."""
    found = find_config(config)
    if found is None:
        raise ConfigError("model.path: no config.json of it on this machine; give a folder that has one")
    return found


def read_config(config: Config) -> dict[str, Any] | None:
    """What the file says."""
    path = find_config(config)
    return json.loads(path.read_text()) if path else None
