"""What a run needs of a host besides GPUs: memory, shared memory, room on the disk; counted from the model's sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.pipeline.config import Config
from penstock.pipeline.resources.model_shape import critic_shape, shape_of
from penstock.pipeline.resources.placement import sharers
from penstock.pipeline.resources.trainer_memory import (
    at_once,
    frozen_bytes,
    state_bytes,
    teacher_bytes,
    tower_bytes,
    version_bytes,
)
from penstock.protocols.versions import DTYPE_BYTES
from penstock.services.critic.config import CriticConfig, shares_devices
from penstock.services.learning.config import CheckpointConfig, LearnerConfig
from penstock.services.modeling.decoder_shape import Shape
from penstock.services.rollout.config import TorchEngineConfig, VllmEngineConfig
from penstock.services.runtime import registry
from penstock.services.runtime.custom_scorer import ScorerConfig
from penstock.services.runtime.gpus import GIB
from penstock.services.runtime.registry import ActorSpec
from penstock.services.weights.transports.shared_memory import SEGMENTS

SHM, TRAINER = "PENSTOCK_SHM", "PENSTOCK_TRAINER_MEMORY"
NEW_SHM = "docker compose down && docker volume rm penstock_shm (of a stack with -p NAME: NAME_shm)"
"""Takes that volume alone away: ``down -v`` would take the runs, too."""
PROCESS_GIB = 4.0
"""Of a process that computes: Python, torch, CUDA's context, an engine's own buffers."""
PINNED = 2.0
"""What is registered, beside what it holds, at most: blocks are powers of two."""
SPARE = 1.25


@dataclass(frozen=True)
class HostNeeds:
    """In GiB, of a host that holds the whole run."""

    version: float
    """The model, as engines have it."""
    shared: float
    """Shared memory: a version may be served, another fetched, a third made, while a fourth is held by a reader."""
    offloaded: float
    """What lies on the host in the GPUs' place (`trainer.offload`), whether the trainer rests or not."""
    activations: float
    """What its layers keep for a backward pass, of all ranks (`trainer.offload_activations`)."""
    resting: float
    """What a trainer has there while it rests (`run.placement`: colocated): what it keeps between two steps."""
    staging: float
    """Copies of weights and optimizer's state while a checkpoint is written, of all replicas."""
    routing: float
    """Which experts the embedded engine has sent the tokens of its slots to (`rollout.sampling.routing_replay`)."""
    checkpoints: float
    """On the disk: those that are kept, and the one that is being written."""
    reference: float
    """The reference's model, as `version`; where its sizes are not known, as large as the policy."""
    scorers: float
    """Models of scorers that sleep on the trainer's GPUs, as `version`."""
    critic: float
    """Copies of the critic's, as `staging`, and as large; 0: there is none."""
    critic_offloaded: float
    """As `offloaded`, or as `resting`."""
    critic_activations: float
    """As `activations`."""

    def trainer_node(self, config: Config, gpus: int = 8) -> float:
        """Of the node of the trainer's first rank, where each has ``gpus``: processes, their part of a checkpoint, and
        the versions that are served from there."""
        ranks = min(gpus, config.trainer.ranks)
        own = (self.staging + self.offloaded + self.activations + self.resting) * ranks / config.trainer.ranks
        return ranks * PROCESS_GIB + own + self.shared

    def trainer_nodes(self, config: Config, actors: Mapping[str, int], gpus: int = 8) -> tuple[float, float]:
        """Of the first of these nodes, and of each other (0: there is none), where so many ``actors`` of each kind are
        beside the ranks; without any process's own. Rollouts on the trainer's GPUs map the versions that are served
        from the first node; all others receive them."""
        processes = PROCESS_GIB * min(gpus, config.trainer.ranks)
        received = actors.get("rollout", 0) * self.received
        beside = sum(count * self.beside(kind, config) for kind, count in actors.items()) - received
        if config.run.colocated:
            beside += self.scorers * min(gpus, config.trainer.ranks) / config.trainer.ranks
        first = self.trainer_node(config, gpus) - processes + beside
        other = first - self.shared + received if config.trainer.ranks > gpus else 0.0
        return first + received * (not (config.run.colocated and self.shared)), other

    def asleep(self, config: Config) -> float:
        """Of one rollout that sleeps: its weights, which vLLM puts into registered memory, whose blocks are powers of
        two, and keeps for the next time."""
        rounded = PINNED if isinstance(config.rollout.engine, VllmEngineConfig) else 1.0
        return self.version * rounded * config.run.colocated

    @property
    def received(self) -> float:
        """Of a rollout: the version that it has and the next one. Processes that hold its weights have them together,
        on each of its machines."""
        return 2 * self.version

    def beside(self, kind: str, config: Config) -> float:
        """Of one rollout, reference, critic or built-in scorer on a machine, beside `PROCESS_GIB` of each of its
        processes there; 0 of other actors."""
        mixed = (config.reference.mix < 1) * 4 / DTYPE_BYTES[config.model.dtype]  # in fp32, while it is made
        held = {
            "rollout": self.received + self.routing + self.asleep(config),
            "reference": self.reference * (1 + mixed),
            "critic": (self.critic + self.critic_offloaded + self.critic_activations) / config.critic.nodes,
        }
        scorer = config.scorers.get(kind)
        return _model_gib(config, scorer) if scorer else held.get(kind, 0.0)

    def compose(self, config: Config) -> dict[str, str]:
        """The variables of docker-compose.yml that depend on the model, for a file ``.env``."""
        uses = {
            SHM: self.shared,
            TRAINER: self.trainer_node(config, config.trainer.ranks),
            "PENSTOCK_ROLLOUT_MEMORY": 2 * PROCESS_GIB + self.beside("rollout", config) + self.shared,
            "PENSTOCK_REFERENCE_MEMORY": PROCESS_GIB + self.beside("reference", config),
        }
        if config.with_critic:
            uses["PENSTOCK_CRITIC_MEMORY"] = config.critic.ranks * PROCESS_GIB + self.beside("critic", config)
        return {name: f"{max(8, round(SPARE * gib + 0.5))}g" for name, gib in uses.items()}


def too_small(config: Config, environment: Mapping[str, str]) -> list[str]:
    """What docker compose was given less of than the model needs, a line each: `HostNeeds.compose`'s variables that are
    in ``environment`` with a number of g."""
    needs = host_needs(config)
    if needs is None:
        return []
    problems = []
    for name, wanted in needs.compose(config).items():
        given = environment.get(name, "")
        if given.endswith("g") and given[:-1].isdigit() and int(given[:-1]) < int(wanted[:-1]):
            again = f", and run {NEW_SHM}, since a volume keeps the size it was made with" if name == SHM else ""
            problems.append(
                f"{name}={given}: this model wants {wanted}; put {name}={wanted} into .env (penstock compose-env "
                f"prints all of it){again}"
            )
    return problems


def to_scale(config: Config, environment: Mapping[str, str]) -> list[str]:
    """Of which services docker compose, where ``environment`` is from it, starts one while the config says more; a line
    each."""
    counts = {spec.kind: len(spec.names(config)) for spec in registry.actors(config).values()}
    return [
        f"{kind}.count={count}: docker compose up -d --no-recreate --scale {kind}={count} starts so many ({kind}-gpu="
        f"{count} in the profile gpu)"
        for kind, count in counts.items()
        if TRAINER in environment and count > 1 and kind not in config.scorers
    ]


def host_needs(config: Config) -> HostNeeds | None:
    """None where the model's sizes are not known here."""
    shape = shape_of(config)
    if shape is None:
        return None
    version, lora = _version(shape), config.trainer.lora
    frozen, codes = (size / GIB for size in frozen_bytes(shape, config.trainer))
    trained = shape.adapter(lora.rank, lora.targets, lora.exclude) if lora else shape.learned
    state = state_bytes(config.trainer.optimizer, trained, 0 if lora else shape.ends - shape.frozen_ends)
    means = (state - 4 * trained) / GIB
    state = (state + teacher_bytes(config.trainer, trained) + 4 * shape.frozen) / GIB
    published = version_bytes(shape, config.trainer) / GIB
    shared = SEGMENTS * published if config.weights.transport in ("auto", "shm") else 0.0
    copies = config.trainer.replicas  # each has all of it, and so has the host of each
    towers = tower_bytes(shape, config.trainer) / GIB
    offloaded = copies * means if config.trainer.means_on_host else 0.0
    if config.trainer.weights_on_host:  # weights, and gradients, which are registered with CUDA
        more = registered_share(shape, config.trainer.shards) - 1
        weights = frozen if lora else copies * (8 * trained + 4 * shape.frozen) / GIB
        offloaded = copies * (state + 4 * trained / GIB + towers) + frozen + more * weights
    engine, routing = config.rollout.engine, 0.0
    if config.rollout.sampling.routing_replay and isinstance(engine, TorchEngineConfig):
        routing = engine.max_sequences * engine.max_length * shape.routed_bytes / GIB
    resting = 0.0
    if config.run.colocated:
        kept_here = copies * (state + towers) + frozen - offloaded
        resting = codes + (0.0 if config.trainer.weights_on_host else kept_here)
    reference = _version(shape_of(config, config.reference.path) or shape)
    learned = critic_shape(config) or shape
    shares = config.run.colocated and shares_devices(config)
    critic, of_critic, critic_weights = _critic(learned, config.critic, shares) if config.with_critic else (0.0,) * 3
    scorers = sum(
        scorer.count * _model_gib(config, scorer) for scorer in config.scorers.values() if not scorer.own_gpus
    )
    steps = config.trainer.steps or 0  # where nobody has counted them: none stay for ever
    checkpoints = _stored(config.trainer.checkpoint, steps, state, 4 * (trained + shape.frozen) / GIB)
    checkpoints += _stored(config.critic.checkpoint, steps, critic, critic_weights)
    kept = _activations(shape, config.trainer)
    return HostNeeds(
        version, shared, offloaded, kept, resting, copies * state, routing, checkpoints, reference, scorers,
        config.critic.replicas * critic, of_critic, _activations(learned, config.critic) * config.with_critic,
    )  # fmt: skip


def _stored(checkpoint: CheckpointConfig, steps: int, whole: float, weights: float) -> float:
    """GiB of a learner's checkpoints, of which each has so many, or with its ``weights`` alone."""
    with_all, without = checkpoint.kept(steps)
    return with_all * whole + without * weights


def on_trainer_nodes(config: Config, nodes: int) -> dict[str, int]:
    """Actors of each kind that are beside the ranks on one of so many nodes of the trainer's (`run.placement`:
    colocated), at most."""
    if not config.run.colocated:
        return {}
    specs = registry.actors(config)
    return {kind: -(-specs[kind].count(config) // nodes) for kind in sharers(config)}


def processes_of(spec: ActorSpec, config: Config) -> int:
    """Of one actor: its ranks, and those that vLLM has for its GPUs, one for each."""
    is_vllm = spec.kind == "rollout" and isinstance(config.rollout.engine, VllmEngineConfig)
    return spec.ranks(config) + is_vllm * max(1, spec.gpus(config))


def _critic(shape: Shape, critic: CriticConfig, rests: bool) -> tuple[float, float, float]:
    """GiB of one of its checkpoints; of all that it keeps on the host, where it ``rests`` there or is offloaded; and of
    its weights in a checkpoint."""
    lora = critic.lora
    trained = shape.adapter(lora.rank, lora.targets, lora.exclude) if lora else shape.parameters
    state = state_bytes(critic.optimizer, trained, 0 if lora else shape.ends, "critic")
    frozen, codes = frozen_bytes(shape, critic)
    towers = tower_bytes(shape, critic)
    means = critic.replicas * (state - 4 * trained) * critic.means_on_host
    kept = critic.weights_on_host * (critic.replicas * (state + 4 * trained + towers) + frozen) + means
    if rests:
        kept += codes + (not critic.weights_on_host) * (critic.replicas * (state + towers) + frozen - means)
    return state / GIB, kept / GIB, 4 * trained / GIB


def registered_share(shape: Shape, shards: int) -> float:
    """How much memory of the host a model's parts, cut over so many ``shards``, take as torch registers it with CUDA,
    which is in powers of two; as a share of their own sizes."""
    counts = [(matrix.size, shape.layers * matrix.share) for matrix in shape.matrices.values()]
    if shape.experts:
        experts = shape.experts * shape.expert
        counts += [(size, shape.mixtures) for size in (shape.router, 2 * experts // 3, experts // 3)]
    counts.append((shape.head, 1 + (not shape.tied)))
    registered = sum(count * 2 ** math.ceil(math.log2(size / shards)) for size, count in counts)
    return registered / sum(count * size / shards for size, count in counts)


def _activations(shape: Shape, learner: LearnerConfig) -> float:
    """GiB of all ranks; a pipeline's stage has fewer layers, and as many more micro-batches in flight."""
    if not learner.offload_activations:
        return 0.0
    each = shape.learned_bytes * at_once(shape, learner) / learner.sequence_parallel * shape.hidden
    block = 2 ** math.ceil(math.log2(each))  # as registered memory comes
    return learner.ranks * shape.layers * block / GIB


def _model_gib(config: Config, scorer: ScorerConfig) -> float:
    """GiB of a built-in scorer's model, which is on the host as it is loaded, and while it sleeps; 0 where its sizes
    are not known here."""
    path = scorer.options.get("path") if scorer.built_in else None
    shape = shape_of(config, str(path)) if path else None
    return _version(shape) if shape else 0.0


def _version(shape: Shape) -> float:
    return shape.served * shape.served_bytes / GIB
