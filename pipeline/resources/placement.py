"""Which GPUs of this machine each process of a run gets."""

from __future__ import annotations

from penstock.pipeline.config import Config, ConfigError
from penstock.pipeline.resources.gpus import gpus_of, total_gpus


def place(config: Config, gpus: list[str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each actor, by name: GPUs of its own; where there are too few, and nobody wants several,
    they take turns and share. Raises `ConfigError` where somebody wants several and there are too few."""
    if not gpus:
        return {}
    each, wanted = gpus_of(config), total_gpus(config)
    names = ["trainer", *(f"rollout-{index}" for index in range(config.rollout.count))]
    names += [f"reference-{index}" for index in range(config.reference.count if config.with_reference else 0)]
    names = [name for name in names if each[name.partition("-")[0]]]
    if wanted > len(gpus) and max(each.values()) == 1:
        return {name: gpus[index % len(gpus)] for index, name in enumerate(names)}
    if wanted > len(gpus):
        raise ConfigError(
            f"this run wants {wanted} GPUs (trainer.ranks={config.trainer.ranks}, rollout.count={config.rollout.count} "
            f"of {each['rollout']} each, references), and there are {len(gpus)}; use fewer rollouts or ranks, set "
            "trainer.algorithm.kl.coefficient=0, or start actors on other machines with penstock serve"
        )
    left = list(gpus)
    placed = {}
    for name in names:
        count = each[name.partition("-")[0]]
        placed[name], left = ",".join(left[:count]), left[count:]
    return placed
