"""How many GPUs a run wants."""

from __future__ import annotations

from penstock.pipeline.config import Config
from penstock.services.runtime import registry


def total_gpus(config: Config) -> int:
    """GPUs of the whole run, none of them shared."""
    return sum(len(spec.names(config)) * spec.gpus(config) for spec in registry.actors(config).values())
