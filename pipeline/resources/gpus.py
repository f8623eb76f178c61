"""How many GPUs a run wants."""

from __future__ import annotations

from penstock.pipeline.config import Config
from penstock.pipeline.resources.placement import is_guest
from penstock.services.runtime import registry


def total_gpus(config: Config) -> int:
    """GPUs of the whole run, which nobody shares but guests (`run.placement`: colocated)."""
    own = [s for s in registry.actors(config).values() if not (config.run.colocated and is_guest(s.kind))]
    return sum(len(spec.names(config)) * spec.gpus(config) for spec in own)
