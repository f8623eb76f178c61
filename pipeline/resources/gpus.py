"""How many GPUs a run wants."""

from __future__ import annotations

from collections.abc import Collection

from penstock.pipeline.config import Config
from penstock.pipeline.resources.placement import sharers
from penstock.services.runtime import registry


def total_gpus(config: Config) -> int:
    """GPUs of the whole run, its programs among it, which nobody shares but who is on the trainer's (`run.placement`:
    colocated)."""
    return gpus_but(config, sharers(config) if config.run.colocated else ()) + gpus_of_programs(config)


def gpus_of_programs(config: Config) -> int:
    """GPUs of the programs that it starts beside itself, but for those that sleep on the trainer's."""
    return sum(program.gpus for name, program in config.programs.items() if name not in config.sleepers)


def gpus_but(config: Config, kinds: Collection[str]) -> int:
    """GPUs of all actors but those of these ``kinds``."""
    own = [spec for spec in registry.actors(config).values() if spec.kind not in kinds]
    return sum(len(spec.names(config)) * spec.gpus(config) for spec in own)
