"""What a run needs of GPUs, from the model's config.json alone: counted, not tried. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import ValidationError

from penstock.pipeline.config import Config, ConfigError, TinyModel
from penstock.pipeline.resources.gpus import total_gpus
from penstock.pipeline.resources.model_shape import critic_shape, shape_of, tiny_shape
from penstock.pipeline.resources.readers import (
    enough_gpus,
    on_each,
    readers_each,
    reference_gib,
    scorer_gib,
    shorter,
    uncounted,
)
from penstock.pipeline.resources.trainer_memory import (
    OVERHEAD_GIB,
    Staged,
    trainer_gib,
    trainer_parts,
)
from penstock.services.critic.config import shares_devices
from penstock.services.learning.config import LearnerConfig
from penstock.services.modeling.decoder_shape import SEEN_BYTES, Shape
from penstock.services.rollout.config import NoEngineConfig, PluginEngineConfig, TorchEngineConfig
from penstock.services.runtime import registry
from penstock.services.runtime.gpus import GIB
from penstock.services.trainer.config import LoraConfig, TrainerConfig

SHARE_STEP = 0.05
"""Shares that are proposed are multiples of it."""
MAPPED_VERSIONS = 3
"""That a trainer keeps for engines that map them: the latest, one before it that is still being loaded, the next."""


@dataclass
class Plan:
    """``lines`` say what is needed; ``problems`` are reasons why it cannot work."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raises `ConfigError` with all problems."""
        if self.problems:
            raise ConfigError("\n".join(self.problems))


def plan(config: Config) -> Plan:
    """Counts what ``config`` needs of GPUs of ``run.gpu_gib``, where the model's sizes are known here."""
    shape = shape_of(config)
    found = Plan()
    _check_learners(config, shape, found)
    if shape is None:
        if config.run.gpu_gib:
            found.lines.append("nothing counted (run.gpu_gib): no config.json at model.path of a decoder that is known")
        return found
    weights = shape.served * shape.served_bytes / GIB
    seeing = f", {shape.towers / 1e9:.2f} B of them in towers" if shape.towers else ""
    if shape.learned_towers:
        seeing += f" ({shape.learned_towers / 1e9:.2f} B learn; what these keep of pictures is not counted)"
    found.lines.append(
        f"model: {shape.name}, {shape.served / 1e9:.2f} B parameters{seeing}, {weights:.1f} GiB in {shape.dtype}"
    )
    _plan_rollouts(config, shape, weights, found)
    _plan_trainer(config, shape, found)
    room = config.run.gpu_gib
    if config.with_reference and (need := reference_gib(config)):
        found.lines.append(f"reference: {config.reference.count} x {need:.1f} GiB{on_each(config.reference.gpus)}")
    if config.with_critic and (need := critic_gib(config, room)):
        found.lines.append(f"critic: {config.critic.ranks} ranks, about {need:.1f} GiB each")
    for kind, scorer in config.scorers.items():
        if need := scorer_gib(config, kind):
            found.lines.append(f"{kind}: {scorer.count} x {need:.1f} GiB{on_each(scorer.gpus)}")
    if left_out := uncounted(config):
        found.lines.append(left_out)
    found.problems += too_large(config, room)
    if config.run.colocated and room:
        _plan_colocated(config, shape, room, found)
    found.lines.append(f"GPUs: {total_gpus(config)}" + (f" of {room:g} GiB" if room else ""))
    return found


def too_large(config: Config, room: float | None) -> list[str]:
    """Why reference, critic and scorers, which no layout makes smaller, do not fit GPUs of ``room`` GiB, and over how
    many they would."""
    problems: list[str] = []
    if not room:
        return problems
    if config.with_reference and (need := reference_gib(config) or 0.0) > room:
        more = enough_gpus(config, "reference", room)
        problems.append(
            f"trainer.algorithm.kl.coefficient: the reference's {need:.1f} GiB{on_each(config.reference.gpus)} do not "
            f"fit a GPU of {room:.3g} GiB; set {f'reference.gpus={more}, or ' if more else ''}the coefficient to 0, "
            f"or take a smaller model (reference.path){shorter(config)}"
        )
    for kind, scorer in config.scorers.items():
        if (need := scorer_gib(config, kind) or 0.0) > room:
            more = enough_gpus(config, kind, room)
            problems.append(
                f"scorers.{kind}.options.path: its {need:.1f} GiB{on_each(scorer.gpus)} do not fit a GPU of "
                f"{room:.3g} GiB; {f'set scorers.{kind}.gpus={more}, or ' if more else ''}take a smaller model"
            )
    if config.with_critic and (need := critic_gib(config, room) or 0.0) > room:
        spared = _spared_by("critic", config.critic, critic_shape(config))
        problems.append(
            f"critic.ranks={config.critic.ranks}: about {need:.0f} GiB a rank do not fit GPUs of {room:.3g} GiB; "
            f"take more ranks, {spared}, or a smaller model (critic.path)"
        )
    return problems


def _check_learners(config: Config, policy: Shape | None, found: Plan) -> None:
    """Whether what a learner's ranks are to share of its model can be dealt out, where its sizes are known."""
    if isinstance(config.model, TinyModel):
        policy = tiny_shape(config.model)
    if policy:
        found.problems += _undealt("trainer", config.trainer, policy)
    critic = critic_shape(config) if config.critic.path else policy
    if config.with_critic and critic:
        found.problems += _undealt("critic", config.critic, critic)


def _undealt(kind: str, learner: LearnerConfig, shape: Shape) -> list[str]:
    """What of a model its ranks cannot share, a line for each key."""
    problems: list[str] = []
    stages, size = learner.pipeline_parallel, learner.expert_parallel
    tensor, sequence = learner.tensor_parallel, learner.sequence_parallel
    unknown = f"{shape.name} is of no family that is shared so (docs/models.md); set it to 1"
    if stages > 1 and not shape.staged:
        problems.append(f"{kind}.pipeline_parallel={stages}: {unknown}")
    if tensor > 1 and not shape.split:
        problems.append(f"{kind}.tensor_parallel={tensor}: {unknown}")
    if sequence > 1 and not shape.packs:
        problems.append(f"{kind}.sequence_parallel={sequence}: {unknown}")
    if stages > shape.layers:
        problems.append(f"{kind}.pipeline_parallel={stages}: the model has {shape.layers} layers; take no more stages")
    if size > 1 and (not shape.experts or shape.experts % size):
        of = f"{shape.experts} experts of each layer" if shape.experts else "model, which has no experts"
        problems.append(f"{kind}.expert_parallel={size} does not divide the {of}; set it to a divisor, or to 1")
    if shape.split and not shape.cuts(tensor):
        between = "" if shape.experts else f", or {shape.intermediate} features between"
        problems.append(
            f"{kind}.tensor_parallel={tensor} does not divide {shape.heads} attention heads, {shape.kv_heads} of keys "
            f"and values{between}; set it to a divisor of all, or to 1"
        )
    elif not shape.deals(sequence, tensor):
        problems.append(
            f"{kind}.sequence_parallel={sequence}: {shape.heads // tensor} attention heads and "
            f"{shape.kv_heads // tensor} of keys and values{' of each rank' * (tensor > 1)} cannot be dealt out to as "
            "many ranks; take a divisor of both, or 1"
        )
    return problems


def _plan_rollouts(config: Config, shape: Shape, weights: float, found: Plan) -> None:
    engine, room = config.rollout.engine, config.run.gpu_gib
    if isinstance(engine, PluginEngineConfig | NoEngineConfig):
        return
    if engine.max_length > shape.max_length:
        found.problems.append(
            f"rollout.engine.max_length={engine.max_length}: {shape.name} has positions for {shape.max_length}"
        )
    if isinstance(engine, TorchEngineConfig):
        _plan_embedded(config, shape, found)
        return
    tensor, stages = (int(engine.vllm.get(f"{kind}_parallel_size", 1)) for kind in ("tensor", "pipeline"))
    if not shape.deals(tensor):
        found.problems.append(
            f"rollout.engine.vllm.tensor_parallel_size={tensor} does not divide {shape.heads} heads and "
            f"{shape.kv_heads} KV heads"
        )
    each = weights / (tensor * stages)
    gpus = registry.actors(config)["rollout"].gpus(config)
    line = f"rollouts: {config.rollout.count} x {gpus} GPUs, {each:.1f} GiB of weights on each"
    if room:
        tokens = int(kv_tokens(shape, room * engine.share, tensor, stages, length=engine.max_length))
        line += (
            f", room for the KV of {tokens:,} tokens: {tokens // engine.max_length} sequences of {engine.max_length:,}"
        )
        if engine.unsized:
            line += f"; all of it in {shape.dtype}: what {engine.unsized} makes of it is not counted"
        elif tokens < engine.max_length:
            found.problems.append(
                f"rollout.engine.vllm.tensor_parallel_size={tensor}: {each:.1f} GiB of weights leave no room for one "
                f"sequence of {engine.max_length} tokens on GPUs of {room:g} GiB"
            )
    found.lines.append(line)


def _plan_embedded(config: Config, shape: Shape, found: Plan) -> None:
    engine, room, need = config.rollout.engine, config.run.gpu_gib, embedded_gib(config, shape)
    assert isinstance(engine, TorchEngineConfig)
    found.lines.append(
        f"rollouts: {config.rollout.count} x {need:.1f} GiB, with the KV of {engine.max_sequences} sequences of "
        f"{engine.max_length:,}"
    )
    if room and need > room:
        found.problems.append(
            f"rollout.engine.max_sequences={engine.max_sequences}: the model, twice while a version is swapped in, and "
            f"the KV of as many sequences of {engine.max_length} tokens take {need:.1f} GiB of a GPU's {room:g}; "
            f"{_fewer(config, shape, room)}"
        )


def _fewer(config: Config, shape: Shape, room: float) -> str:
    """What makes the embedded engine fit ``room`` GiB."""
    engine = config.rollout.engine
    assert isinstance(engine, TorchEngineConfig)
    fits = int(kv_tokens(shape, room, versions=2, length=engine.max_length) / engine.max_length)
    if fits < config.rollout.sampling.n:
        return "set a shorter rollout.engine.max_length, or take rollout.engine.type=vllm, or a smaller model"
    return f"set it to {fits}"


def _plan_trainer(config: Config, shape: Shape, found: Plan) -> None:
    trainer, room = trainer_of(config), config.run.gpu_gib
    need, tokens = trainer_gib(shape, trainer, room, staged(config)), trainer.tokens_per_micro_batch
    size = f"{tokens:,} tokens a micro-batch"
    if shape.longest > tokens:
        size = f"a row of {shape.longest:,} tokens, which is never cut: the longest (rollout.engine.max_length)"
    line = f"trainer: {trainer.ranks} ranks, about {need:.1f} GiB each with {size}"
    mapped = mapped_gib(config, shape, trainer)
    found.lines.append(line + (f", and {mapped:.1f} GiB of versions that engines map" if mapped else ""))
    if not room or need + mapped <= room:
        return
    if need <= room:
        found.problems.append(
            f"weights.transport=cuda_ipc: beside a trainer's {need:.1f} GiB, {MAPPED_VERSIONS} versions that engines "
            f"map take {mapped:.1f}, together more than a GPU's {room:g}; use auto"
        )
        return
    fits = _ranks_that_fit(shape, trainer, room, staged(config))
    spared = "" if trainer.gradient_checkpointing is True else " with trainer.gradient_checkpointing=true"
    hint = f"{fits} ranks{spared} would do; or " if fits else ""
    found.problems.append(
        f"trainer.ranks={trainer.ranks}: about {need:.0f} GiB a rank do not fit GPUs of {room:g} GiB; {hint}take "
        f"{_spared_by('trainer', trainer, shape)}"
    )


def _spared_by(kind: str, learner: LearnerConfig, shape: Shape | None) -> str:
    """What makes a rank smaller and is not done yet, e.g. ``fewer trainer.tokens_per_micro_batch``."""
    words = [f"fewer {kind}.tokens_per_micro_batch"]
    if learner.reshard_after != "layer":
        words.insert(0, f"{kind}.reshard_after=layer")
    if shape and shape.longest >= learner.tokens_per_micro_batch:
        words[-1], twice = "a shorter rollout.engine.max_length", 2 * learner.sequence_parallel
        if not learner.tokens_per_mlp and shape.between and learner.gradient_checkpointing != "selective":
            words.append(f"{kind}.tokens_per_mlp=2048")
        beside = learner.replicas * learner.tensor_parallel * learner.pipeline_parallel
        if shape.packs and shape.deals(twice, learner.tensor_parallel) and not learner.ranks % (twice * beside):
            words.insert(0, f"{kind}.sequence_parallel={twice}")
    if learner.gradient_checkpointing is not True:
        words.append(f"{kind}.gradient_checkpointing=true")
    if not learner.offload and learner.optimizer.visits:
        words.append(f"{kind}.offload=optimizer")
    elif not learner.weights_on_host and learner.tensor_parallel == 1:
        words.append(f"{kind}.offload=true")
    if learner.lora is None:
        whole = isinstance(learner, TrainerConfig) and learner.wants_whole
        words += [f"an adapter ({kind}.lora)"] * (learner.tensor_parallel == 1 and not whole)
    elif not learner.lora.quantize:
        words.append(f"an adapter of a model in 4 bits ({kind}.lora.quantize=nf4)")
    return " or ".join(words)


def _ranks_that_fit(shape: Shape, trainer: TrainerConfig, room: float, beside: Staged) -> int | None:
    """The fewest that would, in the shape that is given, with gradient checkpointing."""
    for ranks in (2**power for power in range(12)):
        try:
            changed = {"ranks": ranks, "gradient_checkpointing": True}
            other = TrainerConfig.model_validate(trainer.model_dump() | changed)
        except ValidationError:  # not a number that nodes, replicas and the like divide
            continue
        if trainer_gib(shape, other, room, beside) <= room:
            return ranks
    return None


def _plan_colocated(config: Config, shape: Shape, room: float, found: Plan) -> None:
    """What lies on a GPU at once: a learner's peak beside who sleeps; who is awake beside the learners' contexts."""
    (readers, readers_gib), critics = readers_each(config, config.trainer.ranks), critics_each(config)
    sleepers = (1 + readers + critics) * OVERHEAD_GIB
    peak = trainer_gib(shape, trainer_of(config), room, staged(config)) + sleepers
    found.lines.append(f"at work: the trainer beside who sleeps, {peak:.1f} GiB of each GPU")
    if critics and (need := critic_gib(config, room)):
        found.lines.append(f"at work: the critic beside who sleeps, {need + sleepers:.1f} GiB of each GPU")
        if need <= room < need + sleepers:
            of_critic = critic_shape(config)
            found.problems.append(
                f"run.placement=colocated: a critic's rank beside who sleeps takes {need + sleepers:.0f} GiB of a "
                f"GPU's {room:g}; take {_spared_by('critic', config.critic, of_critic)}, or critic.own_gpus=true"
            )
    if peak > room:
        found.problems.append(
            f"run.placement=colocated: a trainer's rank beside who sleeps takes {peak:.0f} GiB of a GPU's {room:g}; "
            f"take {_spared_by('trainer', config.trainer, shape)}"
        )
    engine = config.rollout.engine
    if isinstance(engine, PluginEngineConfig | NoEngineConfig):
        return
    beside = (1 + critics) * OVERHEAD_GIB + readers_gib
    context = "the contexts of trainer and critic" if critics else "the trainer's context"
    known = {"the reference": reference_gib(config)} if config.with_reference else {}
    known |= {f"scorers.{kind}": scorer_gib(config, kind) for kind, s in config.scorers.items() if not s.own_gpus}
    known |= {f"programs.{name}": program.gpu_gib for name, program in config.sleepers.items() if program.gpus}
    others = " and ".join([*(name for name, need in known.items() if need), context])
    if unknown := [name for name, need in known.items() if need is None]:
        others += f" ({', '.join(unknown)} not counted)"
    if isinstance(engine, TorchEngineConfig):
        need = embedded_gib(config, shape)
        found.lines.append(f"at rest: an engine's {need:.1f} GiB of each GPU, beside {beside:.1f} GiB of {others}")
        if need <= room < need + beside:
            found.problems.append(
                f"rollout.engine.max_sequences={engine.max_sequences}: beside an engine's {need:.1f} GiB, {beside:.1f} "
                f"of a GPU's {room:g} are taken; {_fewer(config, shape, room - beside)}"
            )
        return
    share = engine.share
    found.lines.append(f"at rest: an engine in {share:g} of each GPU, beside {beside:.1f} GiB of {others}")
    if share * room + beside > room:
        fits = int(max(0.0, 1 - beside / room) / SHARE_STEP) * SHARE_STEP
        found.problems.append(
            f"rollout.engine.vllm.gpu_memory_utilization={share:g}: beside it {beside:.1f} GiB of {room:g} are taken; "
            f"set it to {fits:.2f}"
        )


def staged(config: Config) -> Staged:
    """What lies beside the trainer's model of the version that is published."""
    return "bucket" if config.run.colocated else "version"


def mapped_gib(config: Config, shape: Shape, trainer: TrainerConfig) -> float:
    """GiB of the versions that a ``trainer`` has on its GPU for engines that map them (`weights.transport`: cuda_ipc),
    beside the one that is published; 0 where nobody can."""
    if config.weights.transport != "cuda_ipc" or trainer.ranks > 1:
        return 0.0
    return MAPPED_VERSIONS * trainer_parts(shape, trainer).get("published version", 0.0)


def critics_each(config: Config) -> int:
    """Whether a critic's rank is on a GPU of the trainer's, if `run.placement` is colocated."""
    return int(shares_devices(config) and config.critic.device != "cpu")


def critic_gib(config: Config, gpu_gib: float | None) -> float | None:
    """GiB of one of a critic's ranks at its peak: a trainer's; the head of one of values is smaller, which is not
    counted. None where the sizes of its model are not known here."""
    shape = critic_shape(config)
    return None if shape is None else trainer_gib(shape, critic_of(config), gpu_gib, "nothing")


def trainer_of(config: Config) -> TrainerConfig:
    """The trainer as its ranks have it: of a deterministic run pinned."""
    return config.trainer.pinned() if config.run.deterministic else config.trainer


def critic_of(config: Config) -> TrainerConfig:
    """A trainer that is cut and spares memory as the critic's ranks do."""
    critic = config.critic.pinned() if config.run.deterministic else config.critic
    given = {name: getattr(critic, name) for name in LearnerConfig.model_fields if name != "lora"}
    # What is said of a policy's adapter is not asked of this one.
    lora = LoraConfig.model_construct(**critic.lora.model_dump()) if critic.lora else None
    return TrainerConfig(**given).model_copy(update={"lora": lora})


def kv_tokens(
    shape: Shape, room: float, tensor: int = 1, stages: int = 1, versions: int = 1, length: float = 1 << 13
) -> float:
    """Tokens whose KV an engine has room for beside so many ``versions`` of the weights, in ``room`` GiB of each of its
    ``tensor`` x ``stages`` GPUs; where it keeps a state of each sequence too, of sequences of ``length`` tokens."""
    weights = versions * shape.served * shape.served_bytes / (tensor * stages) / GIB
    state = shape.state_bytes / length / (tensor * stages)
    token = (shape.kv_bytes / (shape.kv_ranks(tensor) * stages) + state) / GIB
    return max(0.0, room - weights - OVERHEAD_GIB) / token


def embedded_gib(config: Config, shape: Shape) -> float:
    """GiB of the embedded engine: the version that it serves, the next one beside it, and the KV of all that it may
    decode at once, which is made at its start."""
    engine = config.rollout.engine
    assert isinstance(engine, TorchEngineConfig)
    kv = engine.max_sequences * (engine.max_length * shape.kv_bytes + shape.state_bytes)
    return (2 * shape.served * shape.served_bytes + kv + SEEN_BYTES * shape.sees) / GIB + OVERHEAD_GIB
