"""What a run needs of GPUs, from the model's config.json alone: counted, not tried. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.pipeline.config import Config, ConfigError, TinyModel
from penstock.pipeline.resources.gpus import total_gpus
from penstock.pipeline.resources.model_shape import Shape, shape_of
from penstock.pipeline.resources.trainer_memory import GIB, LOGITS_GIB, OVERHEAD_GIB, critic_gib, trainer_gib
from penstock.protocols.versions import DTYPE_BYTES
from penstock.services.rollout.config import PluginEngineConfig, VllmEngineConfig
from penstock.services.runtime import registry

VLLM_DEFAULT = 0.9
"""What vLLM takes of a GPU unless it is told."""
SHARE_STEP = 0.05
"""Shares that are proposed are multiples of it."""


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
    _check_experts(config, shape, found)
    _check_stages(config, shape, found)
    if shape is None:
        if config.run.gpu_gib:
            found.lines.append("nothing counted (run.gpu_gib): no config.json of a dense decoder at model.path")
        return found
    dtype, size = config.model.dtype, DTYPE_BYTES[config.model.dtype]
    weights = shape.parameters * size / GIB
    found.lines.append(f"model: {shape.name}, {shape.parameters / 1e9:.2f} B parameters, {weights:.1f} GiB in {dtype}")
    _plan_rollouts(config, shape, weights, found)
    _plan_trainer(config, shape, found)
    room = config.run.gpu_gib
    if config.with_reference:
        need = reference_gib(shape, config)
        found.lines.append(f"reference: {config.reference.count} x {need:.1f} GiB")
        if room and need > room:
            found.problems.append(
                f"trainer.algorithm.kl.coefficient: the reference's {need:.1f} GiB do not fit a GPU of {room:g} "
                "GiB, and it is not cut; set it to 0"
            )
    if config.with_critic:
        need = critic_gib(shape, config.critic, room)
        found.lines.append(f"critic: {config.critic.ranks} ranks, about {need:.1f} GiB each")
        if room and need > room:
            found.problems.append(
                f"critic.ranks={config.critic.ranks}: about {need:.0f} GiB a rank do not fit GPUs of {room:g} GiB; "
                "take more ranks, critic.gradient_checkpointing, fewer critic.tokens_per_micro_batch, or a smaller "
                "model (critic.path)"
            )
    if config.run.colocated and room:
        _plan_colocated(config, shape, room, found)
    found.lines.append(f"GPUs: {total_gpus(config)}" + (f" of {room:g} GiB" if room else ""))
    return found


def _check_stages(config: Config, shape: Shape | None, found: Plan) -> None:
    """Of the policy; a critic's model may be another."""
    stages = config.trainer.pipeline_parallel
    layers = config.model.layers if isinstance(config.model, TinyModel) else shape.layers if shape else stages
    if stages > layers:
        found.problems.append(f"trainer.pipeline_parallel={stages}: the model has {layers} layers; take no more stages")


def _check_experts(config: Config, shape: Shape | None, found: Plan) -> None:
    """Of the policy; a critic's model may be another."""
    size = config.trainer.expert_parallel
    experts = config.model.experts if isinstance(config.model, TinyModel) else shape.experts if shape else size
    if size > 1 and (not experts or experts % size):
        of = f"{experts} experts of each layer" if experts else "model, which has no experts"
        found.problems.append(f"trainer.expert_parallel={size} does not divide the {of}; set it to a divisor, or to 1")


def _plan_rollouts(config: Config, shape: Shape, weights: float, found: Plan) -> None:
    engine, room = config.rollout.engine, config.run.gpu_gib
    if isinstance(engine, PluginEngineConfig):
        return
    if engine.max_length > shape.max_length:
        found.problems.append(
            f"rollout.engine.max_length={engine.max_length}: {shape.name} has positions for {shape.max_length}"
        )
    options = engine.vllm if isinstance(engine, VllmEngineConfig) else {}
    tensor, stages = int(options.get("tensor_parallel_size", 1)), int(options.get("pipeline_parallel_size", 1))
    if not shape.deals(tensor):
        found.problems.append(
            f"rollout.engine.vllm.tensor_parallel_size={tensor} does not divide {shape.heads} heads and "
            f"{shape.kv_heads} KV heads"
        )
    each = weights / (tensor * stages)
    token = shape.kv_bytes(config.model.dtype) / (min(tensor, shape.kv_heads) * stages) / GIB
    gpus = registry.actors(config)["rollout"].gpus(config)
    line = f"rollouts: {config.rollout.count} x {gpus} GPUs, {each:.1f} GiB of weights on each"
    if room:
        share = float(options.get("gpu_memory_utilization", VLLM_DEFAULT))
        left = room * share - each - OVERHEAD_GIB
        tokens = int(max(0.0, left) / token)
        line += (
            f", room for the KV of {tokens:,} tokens: {tokens // engine.max_length} sequences of {engine.max_length:,}"
        )
        if tokens < engine.max_length:
            found.problems.append(
                f"rollout.engine.vllm.tensor_parallel_size={tensor}: {each:.1f} GiB of weights leave no room for one "
                f"sequence of {engine.max_length} tokens on GPUs of {room:g} GiB"
            )
    found.lines.append(line)


def _plan_trainer(config: Config, shape: Shape, found: Plan) -> None:
    trainer, room = config.trainer, config.run.gpu_gib
    need, tokens = trainer_gib(shape, trainer, room), trainer.tokens_per_micro_batch
    found.lines.append(
        f"trainer: {trainer.ranks} ranks, about {need:.1f} GiB each with {tokens:,} tokens a micro-batch"
    )
    if not room or need <= room:
        return
    hint = "; take fewer tokens_per_micro_batch"
    for ranks in (2**power for power in range(12)):
        other = trainer.model_copy(update={"ranks": ranks, "gradient_checkpointing": True})
        if trainer_gib(shape, other, room) <= room:
            hint = f"; {ranks} ranks with gradient_checkpointing would do"
            break
    found.problems.append(
        f"trainer.ranks={trainer.ranks}: about {need:.0f} GiB a rank do not fit GPUs of {room:g} GiB{hint}"
    )


def _plan_colocated(config: Config, shape: Shape, room: float, found: Plan) -> None:
    """What lies on a GPU at once: the trainer's peak beside who sleeps; who is awake beside the trainer's context."""
    asleep = (1 + config.with_reference) * OVERHEAD_GIB
    peak = trainer_gib(shape, config.trainer, room) + asleep
    found.lines.append(f"at work: the trainer beside who sleeps, {peak:.1f} GiB of each GPU")
    if peak > room:
        found.problems.append(
            f"run.placement=colocated: a trainer's rank beside who sleeps takes {peak:.0f} GiB of a GPU's {room:g}; "
            "take fewer trainer.tokens_per_micro_batch, gradient_checkpointing or offload"
        )
    engine = config.rollout.engine
    if not isinstance(engine, VllmEngineConfig):
        return
    share = float(engine.vllm.get("gpu_memory_utilization", VLLM_DEFAULT))
    beside = OVERHEAD_GIB + (reference_gib(shape, config) if config.with_reference else 0.0)
    others = "the reference and the trainer's context" if config.with_reference else "the trainer's context"
    found.lines.append(f"at rest: an engine in {share:g} of each GPU, beside {beside:.1f} GiB of {others}")
    if share * room + beside > room:
        fits = int(max(0.0, 1 - beside / room) / SHARE_STEP) * SHARE_STEP
        found.problems.append(
            f"rollout.engine.vllm.gpu_memory_utilization={share:g}: beside it {beside:.1f} GiB of {room:g} are taken; "
            f"set it to {fits:.2f}"
        )


def reference_gib(shape: Shape, config: Config) -> float:
    """GiB of a reference at its peak: weights, a layer's activations, a chunk of logits."""
    tokens = config.reference.tokens_per_batch
    wide = shape.chosen * (2 * shape.hidden + 3 * shape.intermediate) if shape.experts else 3 * shape.intermediate
    inner = 2 * tokens * (8 * shape.hidden + wide) / GIB
    return shape.parameters * DTYPE_BYTES[config.model.dtype] / GIB + max(inner, 1.5 * LOGITS_GIB) + OVERHEAD_GIB
