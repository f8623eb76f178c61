"""Actors that share a GPU: whether what they want of its memory fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from penstock.pipeline.config import Config
from penstock.pipeline.resources.memory import (
    SHARE_STEP,
    critic_gib,
    embedded_gib,
    mapped_gib,
    staged,
    trainer_of,
)
from penstock.pipeline.resources.model_shape import shape_of
from penstock.pipeline.resources.placement import is_guest, sharers
from penstock.pipeline.resources.readers import reference_gib, scorer_gib
from penstock.pipeline.resources.trainer_memory import OVERHEAD_GIB, trainer_gib
from penstock.services.rollout.config import TorchEngineConfig, VllmEngineConfig

UTILIZATION = "rollout.engine.vllm.gpu_memory_utilization"
SEQUENCES = "rollout.engine.max_sequences"


def too_much(config: Config, placed: Mapping[str, str], sizes: Mapping[str, float]) -> list[str]:
    """What cannot fit, a line for each GPU that is asked for more than it has; ``placed`` are the GPUs of each actor,
    by its name, ``sizes`` the GiB of each GPU. A model of unknown size counts as small."""
    tenants: dict[str, list[str]] = defaultdict(list)
    for actor, gpus in placed.items():
        for gpu in gpus.split(","):
            tenants[gpu].append(actor)
    problems = []
    for gpu, actors in tenants.items():
        size = sizes.get(gpu)
        if len(actors) < 2 or not size:
            continue
        shares = {actor: _share(config, actor, size) for actor in actors}
        for at_once in _phases(config, shares, OVERHEAD_GIB / size):
            if sum(at_once.values()) > 1:
                problems.append(_say(config, gpu, size, at_once))
    return problems


def _phases(config: Config, shares: Mapping[str, float], resting: float) -> list[dict[str, float]]:
    """What is used of a GPU at the same time. Who rests or sleeps still has a context there, ``resting``."""
    if not config.run.colocated:
        return [dict(shares)]
    learners = [actor for actor in shares if not is_guest(config, actor)]
    turns = [[actor] for actor in learners] if "critic" in sharers(config) else [learners]
    turns.append([actor for actor in shares if is_guest(config, actor)])
    return [{actor: share if actor in turn else resting for actor, share in shares.items()} for turn in turns]


def _say(config: Config, gpu: str, size: float, shares: Mapping[str, float]) -> str:
    told = ", ".join(f"{actor} {share:.2f}" for actor, share in shares.items())
    engine = config.rollout.engine
    rollouts = [actor for actor in shares if actor.startswith("rollout")]
    engines = rollouts if isinstance(engine, VllmEngineConfig) else []
    others = sum(share for actor, share in shares.items() if actor not in engines)
    room = int(max(0.0, 1 - others) / max(1, len(engines)) / SHARE_STEP) * SHARE_STEP
    key, remedy = UTILIZATION if engines else "run.gpu_gib", "use more GPUs"
    if rollouts and isinstance(engine, TorchEngineConfig):
        key, remedy = f"{SEQUENCES}={engine.max_sequences}", f"set fewer {SEQUENCES}, or use more GPUs"
    if engines and room >= SHARE_STEP:
        remedy = f"set {UTILIZATION}={room:.2f}, or use more GPUs"
    return (
        f"{key}: GPU {gpu} ({size:.0f} GiB) is shared by {told}: together "
        f"{sum(shares.values()):.2f} of its memory; {remedy}"
    )


def _share(config: Config, actor: str, size: float) -> float:
    shape = shape_of(config)
    kind = actor.partition("-")[0]
    engine = config.rollout.engine
    if kind == "rollout" and isinstance(engine, VllmEngineConfig):
        return engine.share
    need: float | None = None
    if kind == "rollout" and shape and isinstance(engine, TorchEngineConfig):
        need = embedded_gib(config, shape)
    elif kind == "trainer" and shape:
        trainer = trainer_of(config)
        need = trainer_gib(shape, trainer, size, staged(config)) + mapped_gib(config, shape, trainer)
    elif kind == "critic":
        need = critic_gib(config, size)
    elif kind == "reference":
        need = reference_gib(config)
    elif kind in config.scorers:
        need = scorer_gib(config, kind)
    return (need or OVERHEAD_GIB) / size
