"""What a rank of the trainer holds at its peak, counted from the model's sizes. docs/gpu.md has the table beside it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from penstock.services.learning.adapter_config import AdapterConfig
from penstock.services.learning.config import GRADIENT_SHARE, LearnerConfig
from penstock.services.learning.optimizer_config import OptimizerConfig
from penstock.services.modeling.decoder_shape import Shape
from penstock.services.modeling.layer_sizes import Linear, Matrix
from penstock.services.runtime.gpus import GIB
from penstock.services.trainer.config import TrainerConfig
from penstock.services.weights.config import GPU_BUCKET_MB

CHUNK = 64
"""Tokens whose scores linear attention makes at once."""
OVERHEAD_GIB = 1.5
"""CUDA context, allocator and collectives of a process."""
EIGHT_BIT_BYTES = 2 * (1 + 4 / 256)
"""Of a parameter: two moments of a byte, and a scale for each 256 of them."""
FOUR_BIT_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Of a number in 4 bits: a scale of 8 bits for each 64, and one of 32 for each 256 of those."""
LOGITS_GIB = 0.5
"""Chunks of logits and of their gradients, beside the peak of a layer: `logprobs.LOGIT_BYTES` twice. Where teachers'
distributions are learned one more for each, in which all but its own tokens are summed, and one for their gradients."""


Staged = Literal["version", "bucket", "nothing"]
"""What lies beside the model of the version that is published: all of it; one bucket at a time, where versions go by
the host (`run.placement`: colocated); nothing of a critic."""


def trainer_gib(
    shape: Shape, trainer: TrainerConfig, gpu_gib: float | None = None, staged: Staged = "version"
) -> float:
    """GiB of one rank at its peak."""
    return sum(trainer_parts(shape, trainer, gpu_gib, staged).values())


def trainer_parts(
    shape: Shape, trainer: TrainerConfig, gpu_gib: float | None = None, staged: Staged = "version"
) -> dict[str, float]:
    """GiB of one rank at its peak, by what they are; of a pipeline, of a rank of the stage that takes most."""
    stages, each = trainer.pipeline_parallel, of_stage(trainer)
    if shape.frozen and not trainer.freeze:  # a critic that begins as the policy does learns all of it
        shape = replace(shape, still=(), still_ends=(0, 0))
    every = [_parts(shape.stage(number, stages), each, stages - number, gpu_gib, staged) for number in range(stages)]
    return max(every, key=lambda parts: sum(parts.values()))


def of_stage(trainer: TrainerConfig) -> TrainerConfig:
    """How the ranks of a pipeline's stage divide its part of the model among them."""
    ranks = trainer.ranks // trainer.pipeline_parallel
    return trainer.model_copy(update={"ranks": ranks, "pipeline_parallel": 1})


def _parts(
    shape: Shape, trainer: TrainerConfig, in_flight: int, gpu_gib: float | None, staged: Staged
) -> dict[str, float]:
    """Of a stage that has gone forward through ``in_flight`` micro-batches when its first backward begins: at its peak,
    where a later micro-batch's backward begins, or where embedding and head are summed, or gathered. Always there, and
    cut: fp32 weights, their gradient and the optimizer's state; the version that is published, in 16 bits. With an
    adapter that alone has gradient and state, and the model is in what is computed with: bf16, or else fp32. What Muon
    puts together of matrices in an update, and what visits of means that lie on the host, is less than an update finds
    free: units and activations are gone by then."""
    lora, tensor, shards, wide = trainer.lora, trainer.tensor_parallel, trainer.shards, shape.learned_bytes
    # Of a layer, what one rank gathers: experts are not cut by tensor parallelism, but dealt out.
    dealt, mixtures = shape.experts / trainer.expert_parallel, shape.mixtures
    layer = shape.shared / tensor + shape.router + dealt * shape.expert
    plain = shape.layers * shape.shared / tensor + mixtures * shape.router + shape.ends
    whole = plain + mixtures * dealt * shape.expert
    own = math.ceil(dealt / (shards / trainer.expert_parallel))  # an expert is not cut
    cut = plain / shards + mixtures * own * shape.expert
    still = shape.frozen - shape.learned_towers
    trained = shape.adapter(lora.rank, lora.targets, lora.exclude) / shards if lora else cut - still / shards
    coded = coded_matrices(shape, lora)
    in_codes = sum(matrix.numbers for matrix in coded)  # of a layer
    codes = FOUR_BIT_BYTES * shape.layers * in_codes
    # Of the layers, what is gathered at once: one, and another on its way; or all.
    several = 2 * layer if trainer.reshard_after == "layer" else whole - shape.ends
    if lora:
        layer -= in_codes  # neither cut nor gathered: made anew, one by one
        several -= in_codes * (2 if trainer.reshard_after == "layer" else shape.layers)
        ends, layers = wide * shape.ends, wide * several
        # While they are gathered, and the first layer behind them: as they come, and as they are put together.
        sums = 2.0 * wide * (shape.ends + layer)
    else:
        ends = wide * (shape.ends + shape.head)  # gathered, with the head's gradient
        layers = wide * several + 4 * layer  # and one's gradient in fp32
        sums = (wide + 4) * shape.ends
        if trainer.replicas > 1:  # each layer's part is kept beside its gradient until all replicas' are summed
            sums += 4 * (cut - shape.ends / shards)
    # Not cut, so nothing is gathered.
    if trainer.ranks == 1 and shape.whole and wide == 4 and not trainer.weights_on_host:
        ends, layers, sums = 0 if lora else 8 * shape.head, 0.0, 0.0  # the head's gradient, and a chunk's
    turned = sum(matrix.numbers for name, matrix in shape.matrices.items() if name in ("o_proj", "down_proj"))
    kept, inner = activations(shape, trainer, in_flight)
    moved = trainer.offload_activations and trainer.gradient_checkpointing is True  # else it stays, or weights go too
    acts, logits = inner if moved else kept + inner, _logits_bytes(shape, trainer)
    # Whole gradients are cut, unit by unit, in the last micro-batch alone.
    keeps = keeps_whole_gradients(trainer, shape, gpu_gib)
    summed = shape.adapter(lora.rank, lora.targets, lora.exclude) if lora else whole - still
    held = {
        "weights": wide * (cut - shape.layers * in_codes / shards) + 4 * trained if lora else 4 * cut,
        "towers": (wide if lora else 4) * shape.towers / shards,
        "gradients": 4.0 * (summed if keeps else trained),
        "optimizer": _kept_bytes(trainer, trained, 0 if lora else (shape.ends - shape.frozen_ends) / shards),
        "teacher": teacher_bytes(trainer, trained),
        "published version": _staged_bytes(shape, trainer, trained, staged),
        "rows of what is cut by columns": 4 * shape.layers * turned / tensor / shards * (tensor > 1),
    }
    parts = (held if not trainer.weights_on_host else {}) | {
        "gradients until they are summed": 4.0 * summed * (keeps and trainer.weights_on_host),
        "weights in 4 bits": codes,
        "one of them, whole": wide * max((matrix.size for matrix in coded), default=0),
        "towers that see": shape.sight_bytes,
        "pictures, as seen": shape.seen_bytes,
        "gathered units": ends + layers,
        "activations": acts,
        "logits": logits,
        "embedding and head, summed": max(0.0, sums - (ends + layers + acts + logits)),
    }
    return {name: size / GIB for name, size in parts.items() if size} | {"context": OVERHEAD_GIB}


def _staged_bytes(shape: Shape, trainer: TrainerConfig, trained: float, staged: Staged) -> float:
    version = 4 * trained if trainer.sends_adapter else shape.served_bytes * shape.served / trainer.ranks
    return {"version": version, "bucket": min(version, GPU_BUCKET_MB * 2**20), "nothing": 0.0}[staged]


def _logits_bytes(shape: Shape, trainer: TrainerConfig) -> float:
    teachers = len(trainer.algorithm.distill.teachers) if trainer.algorithm.distill else 0
    chunks = 2 + (1 + teachers if teachers else 0)
    return LOGITS_GIB / 2 * chunks * GIB * shape.ends_here


def _kept_bytes(learner: LearnerConfig, trained: float, ends: float) -> float:
    """Of what the optimizer keeps on a device."""
    if learner.means_on_host:
        return 0.0
    if learner.optimizer.moments == "8bit":
        return EIGHT_BIT_BYTES * trained
    section = "trainer" if isinstance(learner, TrainerConfig) else "critic"
    found = state_bytes(learner.optimizer, trained, ends, section) - 4 * trained
    optimizer = learner.optimizer
    if optimizer.type != "custom" or optimizer.options.get("fused") or not optimizer.options.get("foreach", True):
        return found
    return found + 4 * trained * (2 if found else bool(optimizer.weight_decay))  # while torch's `foreach` updates


def frozen_bytes(shape: Shape, trainer: LearnerConfig) -> tuple[float, float]:
    """Of the model that an adapter is trained beside, of all ranks: what is cut over them, and what lies in 4 bits,
    whole on each; 0 where no adapter is."""
    if trainer.lora is None:
        return 0.0, 0.0
    coded = shape.layers * sum(matrix.numbers for matrix in coded_matrices(shape, trainer.lora))
    held = trainer.ranks // trainer.pipeline_parallel
    return trainer.replicas * shape.learned_bytes * (shape.parameters - coded), FOUR_BIT_BYTES * held * coded


def tower_bytes(shape: Shape, trainer: LearnerConfig) -> float:
    """Of the towers that stand still, of one copy of the model."""
    return (shape.learned_bytes if trainer.lora else 4) * (shape.towers - shape.learned_towers)


def coded_matrices(shape: Shape, lora: AdapterConfig | None) -> list[Matrix]:
    """Those of a layer's matrices that lie in 4 bits."""
    return shape.adapted(lora.targets, lora.exclude) if lora and lora.quantize else []


def state_bytes(optimizer: OptimizerConfig, trained: float, ends: float, section: str = "trainer") -> float:
    """Of ``trained`` parameters, and of what the optimizer keeps of them, in fp32: of AdamW two means, of Muon one, but
    for those that are embedding and head (``ends``), which are AdamW's; of another one what a trial has found.
    ``section``: the config's that it is of. Raises `SetupError` where there is no such one."""
    if optimizer.type == "custom":
        from penstock.services.learning.custom_optimizer import kept_by

        return 4 * trained * (1 + len(kept_by(optimizer, f"{section}.optimizer").shaped))
    return 8 * trained + 4 * ends if optimizer.type == "muon" else 12 * trained


def teacher_bytes(trainer: TrainerConfig, trained: float) -> float:
    """Of the running mean of ``trained`` weights that is the policy's own teacher, in fp32; 0 where it has none."""
    return 4 * trained * (getattr(trainer.algorithm.advantage, "teacher_rate", 1.0) < 1)


def version_bytes(shape: Shape, trainer: TrainerConfig) -> float:
    """Of a version that is published: the model's, or those of an adapter alone, in fp32."""
    lora = trainer.lora if trainer.sends_adapter else None
    return 4 * shape.adapter(lora.rank, lora.targets, lora.exclude) if lora else shape.served * shape.served_bytes


def at_once(shape: Shape, learner: LearnerConfig) -> int:
    """Tokens of the largest micro-batch: a row that is longer than one stands alone, whole."""
    return max(learner.tokens_per_micro_batch, shape.longest)


def activations(shape: Shape, trainer: TrainerConfig, in_flight: int = 1) -> tuple[float, float]:
    """Bytes that a backward begins with: what all layers keep, of each micro-batch ``in_flight``, and what one of them
    has beside it."""
    tokens, tensor = at_once(shape, trainer) / trainer.sequence_parallel, trainer.tensor_parallel
    number = shape.learned_bytes * tokens  # one of each token's
    kept = number * shape.hidden * shape.layers  # what goes into each layer
    inner = number * (8 * shape.hidden + 4 * shape.hidden / tensor)  # and what it does
    if shape.linear:
        inner += number * _state_numbers(shape.linear)
    if trainer.algorithm.router_balance:  # what routers say is kept of all layers
        inner += number * shape.experts * shape.mixtures
    tiles = min(1.0, trainer.tokens_per_mlp / tokens) if trainer.tokens_per_mlp else 1.0
    if shape.experts:
        inner += number * (shape.chosen * (2 * shape.hidden + 6 * shape.intermediate) + 5 * tiles * shape.beside)
    else:
        inner += number * 5 * tiles * shape.intermediate / tensor
    if tiles < 1:  # put together of tiles: what they give, its gradient, and those of the matrices, also of one tile's
        inner += 2 * number * shape.hidden
        inner += (4 + shape.learned_bytes) * shape.between / tensor * (trainer.lora is None)
    if not trainer.gradient_checkpointing:
        kept = number * _saved(shape, tensor, tiles < 1) * (shape.layers - 1 / in_flight)
    elif trainer.gradient_checkpointing == "selective":  # and what the matrices gave
        products = [*shape.matrices.values()]
        if lora := trainer.lora:  # a product of its own beside each
            products += shape.adapted(lora.targets, lora.exclude)
        kept += number * shape.layers * sum(each.share * each.outputs for each in products) / tensor
    return kept * in_flight, inner


def _saved(shape: Shape, tensor: int, tiled: bool) -> float:
    """Numbers of 16 bits that a layer keeps of each token for its backward: two norms (each its input in fp32, what it
    makes of that, and the result), queries, keys, values and what attention gives, and four of the feed-forward part
    (gate, its activation, up, their product), of each expert that the token went to; none of these where it is
    ``tiled``, but of experts."""
    heads = (shape.heads + shape.kv_heads) * shape.head_dim
    attention: float = 2 * heads + (3 * heads if shape.norms_heads else 0)
    attention += 3 * shape.heads * shape.head_dim if shape.gated else 0
    if shape.linear:
        attention = shape.attending * attention + (1 - shape.attending) * _state_numbers(shape.linear)
    if shape.experts:
        plain = shape.dense / shape.layers
        beside, dense = (0, 0) if tiled else (4 * shape.beside, 4 * shape.dense_inner)
        each = shape.chosen * (2 * shape.hidden + 4 * shape.intermediate) + beside
        return 8 * shape.hidden + attention / tensor + (1 - plain) * each + plain * dense
    return 8 * shape.hidden + (attention + 4 * shape.intermediate * (not tiled)) / tensor


def _state_numbers(linear: Linear) -> float:
    """Numbers of 16 bits that linear attention keeps of each token: what the convolution mixes, before and behind it;
    queries and keys, one for each head of values; values, what comes of them, its gate and its norm; and, in each
    head, a chunk's scores."""
    return 2 * linear.mixed + 2 * linear.heads * linear.key_size + 5 * linear.values + CHUNK * linear.heads


def keeps_whole_gradients(trainer: TrainerConfig, shape: Shape, gpu_gib: float | None) -> bool:
    """Each rank keeps the gradient of all that learns of the model, or stage, over a step's micro-batches, on a GPU of
    ``gpu_gib``."""
    if (trainer.ranks == 1 and not trainer.weights_on_host) or trainer.sum_gradients == "micro_batch":
        return False
    if trainer.sum_gradients == "step":
        return True
    if gpu_gib is None:
        return False
    lora, cut = trainer.lora, trainer.replicas / trainer.ranks
    learned = float(shape.parameters - shape.frozen * bool(trainer.freeze) + shape.learned_towers)
    held = 4 * shape.parameters * cut
    if lora:
        learned, (frozen, codes) = shape.adapter(lora.rank, lora.targets, lora.exclude), frozen_bytes(shape, trainer)
        held = 4 * learned * cut + (frozen + codes) / trainer.ranks
    free = gpu_gib - OVERHEAD_GIB - held / GIB
    return 4 * learned / GIB <= GRADIENT_SHARE * free
