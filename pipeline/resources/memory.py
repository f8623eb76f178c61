"""What a run needs of GPUs, from the model's config.json alone: counted, not tried. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.pipeline.config import Config, ConfigError, TinyModel
from penstock.pipeline.resources.gpus import total_gpus
from penstock.protocols.versions import DTYPE_BYTES
from penstock.services.rollout.config import PluginEngineConfig, VllmEngineConfig
from penstock.services.runtime import registry

GIB = float(1 << 30)
SHIPPED = Path(__file__).parents[2] / "configs" / "models"
"""config.json of models that the shipped configs name, so that planning needs no hub: ORGANISATION--NAME.json."""
OVERHEAD_GIB = 1.5
"""CUDA context, allocator and collectives of a process."""


@dataclass(frozen=True)
class Shape:
    """A dense decoder's sizes."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    max_length: int

    @property
    def layer(self) -> int:
        """Parameters of one layer's matrices."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def ends(self) -> int:
        """Parameters of embedding and head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All, less norms and biases."""
        return self.layers * self.layer + self.ends

    def kv_bytes(self, dtype: str) -> int:
        """KV of one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]


@dataclass
class Plan:
    """``lines`` say what is needed; ``problems`` are reasons why it cannot work."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raises `ConfigError` with all problems."""
        if self.problems:
            raise ConfigError("\n".join(self.problems))


def shape_of(config: Config) -> Shape | None:
    """The model's sizes; None where its config.json is not on this machine, or describes no plain decoder."""
    if isinstance(config.model, TinyModel):
        return None
    model = config.model.path
    for path in (Path(model) / "config.json", SHIPPED / f"{model.replace('/', '--')}.json"):
        if path.is_file():
            return _shape(Path(model).name, json.loads(path.read_text()))
    return None


def _shape(name: str, data: dict[str, Any]) -> Shape | None:
    if any("experts" in key for key in data):
        return None  # a mixture of experts is not counted yet
    try:
        heads = data["num_attention_heads"]
        return Shape(
            name, data["hidden_size"], data["intermediate_size"], data["num_hidden_layers"], heads,
            data.get("num_key_value_heads") or heads, data.get("head_dim") or data["hidden_size"] // heads,
            data["vocab_size"], bool(data.get("tie_word_embeddings")), data.get("max_position_embeddings") or 1 << 20,
        )  # fmt: skip
    except KeyError:
        return None


def plan(config: Config) -> Plan:
    """Counts what ``config`` needs of GPUs of ``run.gpu_gib``, where the model's sizes are known here."""
    shape = shape_of(config)
    found = Plan()
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
        found.lines.append(f"reference: {config.reference.count} x {weights + OVERHEAD_GIB:.1f} GiB")
        if room and weights + OVERHEAD_GIB > room:
            found.problems.append(
                f"trainer.algorithm.kl.coefficient: the reference's {weights:.1f} GiB do not fit a GPU of {room:g} "
                "GiB, and it is not cut; set it to 0"
            )
    found.lines.append(f"GPUs: {total_gpus(config)}" + (f" of {room:g} GiB" if room else ""))
    return found


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
    if shape.heads % tensor or (shape.kv_heads % tensor and tensor % shape.kv_heads):
        found.problems.append(
            f"rollout.engine.vllm.tensor_parallel_size={tensor} does not divide {shape.heads} heads and "
            f"{shape.kv_heads} KV heads"
        )
    each = weights / (tensor * stages)
    token = shape.kv_bytes(config.model.dtype) / (min(tensor, shape.kv_heads) * stages) / GIB
    gpus = registry.actors(config)["rollout"].gpus(config)
    line = f"rollouts: {config.rollout.count} x {gpus} GPUs, {each:.1f} GiB of weights on each"
    if room:
        share = float(options.get("gpu_memory_utilization", 0.9))
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
    ranks, room, tokens = config.trainer.ranks, config.run.gpu_gib, config.trainer.tokens_per_micro_batch
    need = trainer_gib(shape, ranks, tokens, config.trainer.gradient_checkpointing)
    found.lines.append(f"trainer: {ranks} ranks, about {need:.1f} GiB each with {tokens:,} tokens a micro-batch")
    if room and need > room:
        enough = next((n for n in (2**k for k in range(12)) if trainer_gib(shape, n, tokens, True) <= room), None)
        hint = (
            f"; {enough} ranks with gradient_checkpointing would do"
            if enough
            else "; take fewer tokens_per_micro_batch"
        )
        found.problems.append(
            f"trainer.ranks={ranks}: about {need:.0f} GiB a rank do not fit GPUs of {room:g} GiB{hint}"
        )


def trainer_gib(shape: Shape, ranks: int, tokens: int, checkpointing: bool) -> float:
    """GiB of one FSDP2 rank: fp32 weights, gradients and Adam's two moments, cut; embedding and head gathered, in bf16
    with an fp32 gradient; two layers gathered; activations in bf16. Within a fifth of what was measured."""
    cut = 16 * shape.parameters / ranks
    gathered = 0 if ranks == 1 else 6 * shape.ends + 2 * 2 * shape.layer
    kept = 2 * tokens * shape.hidden * shape.layers
    inner = 2 * tokens * (12 * shape.hidden + 5 * shape.intermediate)  # of one layer, or of all of them
    activations = kept + inner * (1 if checkpointing else shape.layers)
    return (cut + gathered + activations) / GIB + OVERHEAD_GIB
