"""Which GPUs of this machine each process of a run gets."""

from __future__ import annotations

from penstock.pipeline.config import Config, ConfigError
from penstock.services.runtime import registry


def place(config: Config, gpus: list[str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each actor, by name: GPUs of its own; where there are too few, and nobody wants several,
    they take turns and share. Raises `ConfigError` where somebody wants several and there are too few."""
    if not gpus:
        return {}
    each = {name: spec.gpus(config) for spec in registry.started_here(config) for name in spec.names(config)}
    each = {name: count for name, count in each.items() if count}
    wanted = sum(each.values())
    if wanted > len(gpus) and max(each.values()) == 1:
        return {name: gpus[index % len(gpus)] for index, name in enumerate(each)}
    if wanted > len(gpus):
        many = ", ".join(f"{name} {count}" for name, count in each.items())
        raise ConfigError(
            f"this run wants {wanted} GPUs ({many}), and there are {len(gpus)}; use fewer rollouts (rollout.count) or "
            "ranks (trainer.ranks, critic.ranks), set trainer.algorithm.kl.coefficient=0, or have others start "
            "them (run.elsewhere, penstock join)"
        )
    left = list(gpus)
    placed = {}
    for name, count in each.items():
        placed[name], left = ",".join(left[:count]), left[count:]
    return placed
