"""Which GPUs of this machine each process of a run gets."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.pipeline.config import Config, ConfigError
from penstock.services.runtime import registry

GUESTS = ("rollout", "reference")
"""Kinds of actors that can sleep."""


def place(config: Config, gpus: list[str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each actor, by name: GPUs of its own; where there are too few, and nobody wants several,
    they take turns and share; with `run.placement`: colocated, rollouts and reference are on the trainer's. Raises
    `ConfigError` where somebody wants several and there are too few."""
    if not gpus:
        return {}
    each = {name: spec.gpus(config) for spec in registry.started_here(config) for name in spec.names(config)}
    each = {name: count for name, count in each.items() if count}
    if config.run.colocated and "trainer" in each:
        return _colocate(config, gpus, each)
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
    return _in_order(gpus, each)


def _in_order(gpus: list[str], each: Mapping[str, int]) -> dict[str, str]:
    left = list(gpus)
    placed = {}
    for name, count in each.items():
        placed[name], left = ",".join(left[:count]), left[count:]
    return placed


def _colocate(config: Config, gpus: list[str], each: Mapping[str, int]) -> dict[str, str]:
    """Learners have GPUs of their own; guests those of the trainer, engines beside each other."""
    guests = {name: count for name, count in each.items() if is_guest(name)}
    own = {name: count for name, count in each.items() if name not in guests}
    if sum(own.values()) > len(gpus):
        many = ", ".join(f"{name} {count}" for name, count in own.items())
        raise ConfigError(
            f"this run wants {sum(own.values())} GPUs ({many}), which rollouts and reference share "
            f"(run.placement=colocated), and there are {len(gpus)}; use fewer ranks (trainer.ranks, critic.ranks)"
        )
    placed = _in_order(gpus, own)
    trainers = placed["trainer"].split(",")
    engines = {name: count for name, count in guests.items() if name.startswith("rollout")}
    if sum(engines.values()) > len(trainers):
        raise ConfigError(
            f"run.placement=colocated: {len(engines)} rollouts want {sum(engines.values())} GPUs, and trainer.ranks="
            f"{config.trainer.ranks} has {len(trainers)}, which are theirs too; use fewer rollouts (rollout.count) or "
            "smaller ones (rollout.engine.vllm.tensor_parallel_size)"
        )
    placed |= _in_order(trainers, engines)
    others = [name for name in guests if name not in engines]
    return placed | {name: trainers[-1 - index % len(trainers)] for index, name in enumerate(others)}


def is_guest(actor: str) -> bool:
    """With `run.placement`: colocated, an actor of this kind, or name, sleeps while the trainer works."""
    return actor.partition("-")[0] in GUESTS
