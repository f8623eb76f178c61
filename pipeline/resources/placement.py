"""Which GPUs of this machine each process of a run gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import cycle, islice

from penstock.pipeline.config import Config, ConfigError
from penstock.services.critic.config import shares_devices
from penstock.services.runtime import registry


def guests(config: Config) -> tuple[str, ...]:
    """Kinds of actors that sleep while a learner works, if `run.placement` is colocated."""
    return ("rollout", "reference", *(kind for kind, scorer in config.scorers.items() if not scorer.own_gpus))


def guests_beside_rollouts(config: Config) -> list[str]:
    """Those that the run has, but for rollouts."""
    specs = registry.actors(config)
    return [kind for kind in guests(config) if kind != "rollout" and specs[kind].count(config)]


def sharers(config: Config) -> tuple[str, ...]:
    """Kinds of actors that are on the trainer's GPUs, if `run.placement` is colocated."""
    return (*guests(config), "critic") if shares_devices(config) else guests(config)


def place(config: Config, gpus: list[str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each actor, by name: GPUs of its own; where there are too few, and nobody wants several,
    they take turns and share; with `run.placement`: colocated, rollouts, reference and critic are on the trainer's.
    Raises `ConfigError` where somebody wants several and there are too few."""
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
            f"this run wants {wanted} GPUs ({many}), and there are {len(gpus)}; use fewer rollouts (rollout.count), "
            "ranks (trainer.ranks, critic.ranks) or GPUs of scorers (reference.gpus), set "
            "trainer.algorithm.kl.coefficient=0, or have others start them (run.elsewhere, penstock join)"
        )
    return _in_order(gpus, each)


def _in_order(gpus: list[str], each: Mapping[str, int]) -> dict[str, str]:
    left = list(gpus)
    placed = {}
    for name, count in each.items():
        placed[name], left = ",".join(left[:count]), left[count:]
    return placed


def _colocate(config: Config, gpus: list[str], each: Mapping[str, int]) -> dict[str, str]:
    """The trainer, and scorers that share none, have GPUs of their own; guests and critic the trainer's, engines beside
    each other."""
    beside = {name: count for name, count in each.items() if is_guest(config, name)}
    critic = {name: count for name, count in each.items() if name == "critic" and shares_devices(config)}
    own = {name: count for name, count in each.items() if name not in (*beside, *critic)}
    if sum(own.values()) > len(gpus):
        many = ", ".join(f"{name} {count}" for name, count in own.items())
        raise ConfigError(
            f"this run wants {sum(own.values())} GPUs ({many}), which others share "
            f"(run.placement=colocated), and there are {len(gpus)}; use fewer ranks (trainer.ranks, critic.ranks)"
        )
    placed = _in_order(gpus, own)
    shared = placed["trainer"].split(",")
    if sum(critic.values()) > len(shared):
        raise ConfigError(
            f"run.placement=colocated: critic.ranks={config.critic.ranks} want as many GPUs, and trainer.ranks="
            f"{config.trainer.ranks} has {len(shared)}, which are theirs too; use fewer, or critic.own_gpus=true"
        )
    return placed | seated(config, shared, beside) | _in_order(shared, critic)


def seated(config: Config, gpus: list[str], wanting: Mapping[str, int]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of guests, ``wanting`` so many each, among the trainer's ``gpus`` on a machine; empty where
    there is none. Raises `ConfigError` where there are too few."""
    if not gpus:
        return dict.fromkeys(wanting, "")
    engines = {name: count for name, count in wanting.items() if name.partition("-")[0] == "rollout"}
    if sum(engines.values()) > len(gpus):
        raise ConfigError(
            f"run.placement=colocated: {len(engines)} rollouts want {sum(engines.values())} GPUs, and trainer.ranks="
            f"{config.trainer.ranks} has {len(gpus)} here, which are theirs too; use fewer rollouts (rollout.count) or "
            "smaller ones (rollout.engine.vllm.tensor_parallel_size)"
        )
    others = {name: count for name, count in wanting.items() if name not in engines}
    widest = max(others, key=lambda name: others[name], default="")
    if others.get(widest, 0) > len(gpus):
        kind = widest.partition("-")[0]
        raise ConfigError(
            f"run.placement=colocated: {widest} wants {others[widest]} GPUs, and trainer.ranks={config.trainer.ranks} "
            f"has {len(gpus)} here, which are its too; use fewer "
            f"({kind if kind == 'reference' else f'scorers.{kind}'}.gpus)"
        )
    seats = cycle(reversed(gpus))
    return _in_order(gpus, engines) | {name: ",".join(islice(seats, count)) for name, count in others.items()}


def beds(config: Config, gpus: list[str]) -> dict[str, list[str]]:
    """GPUs of each program that sleeps, by its name: of those that a run with ``gpus`` gives its trainer, from the last
    on, behind the seats of other guests. Raises `ConfigError` where there are too few."""
    if not config.sleepers:
        return {}
    wide = {name: program.gpus for name, program in config.sleepers.items()}
    shared = [name for name in place(config, gpus).get("trainer", "").split(",") if name]
    if most := next((name for name, count in wide.items() if count > len(shared)), ""):
        raise ConfigError(
            f"programs.{most}.gpus={wide[most]}: with sleep they are the trainer's (run.placement=colocated), which "
            f"has {len(shared)} here (trainer.ranks={config.trainer.ranks}); use fewer"
        )
    if shared and (none := next((name for name, count in wide.items() if not count), "")):
        raise ConfigError(
            f"programs.{none}.gpus=0: with sleep it is on the trainer's devices (run.placement=colocated), which are "
            "GPUs; set it to 1, or leave sleep and wake out"
        )
    taken = _seats(config, guests_beside_rollouts(config))
    seats = islice(cycle(reversed(shared)), taken % max(1, len(shared)), None)
    return {name: list(islice(seats, program.gpus)) for name, program in config.sleepers.items()}


def seats_of(config: Config, kind: str, number: int) -> list[int]:
    """Which of the trainer's GPUs, by their places, the guest ``number`` of this ``kind``, not a rollout, has among
    those of one machine: as `seated` deals them."""
    others, ranks = guests_beside_rollouts(config), config.trainer.ranks
    if kind not in others:
        return []
    gpus = registry.actors(config)[kind].gpus(config)
    first = _seats(config, others[: others.index(kind)]) + number * gpus
    return [ranks - 1 - seat % ranks for seat in range(first, first + gpus)]


def _seats(config: Config, kinds: Iterable[str]) -> int:
    """How many all guests of these ``kinds`` have together."""
    specs = registry.actors(config)
    return sum(specs[kind].count(config) * specs[kind].gpus(config) for kind in kinds)


def joining_guests(config: Config) -> dict[str, int]:
    """How many guests of each kind come with each machine of a trainer that joins (`run.elsewhere`)."""
    if not config.run.colocated or "trainer" not in config.run.elsewhere:
        return {}
    specs = registry.actors(config)
    kinds = [kind for kind in guests(config) if kind in config.run.elsewhere and specs[kind].count(config)]
    return {kind: -(-specs[kind].count(config) // config.trainer.nodes) for kind in kinds}


def is_guest(config: Config, actor: str) -> bool:
    """With `run.placement`: colocated, an actor of this kind, or name, sleeps while a learner works."""
    return actor.partition("-")[0] in guests(config)
