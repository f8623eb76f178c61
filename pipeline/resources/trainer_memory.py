"""What a rank of the trainer holds at its peak, counted from the model's sizes. docs/gpu.md has the table beside it."""

from __future__ import annotations

from penstock.pipeline.resources.model_shape import Shape
from penstock.services.critic.config import CriticConfig
from penstock.services.learning.config import GRADIENT_SHARE
from penstock.services.trainer.config import TrainerConfig

GIB = float(1 << 30)
OVERHEAD_GIB = 1.5
"""CUDA context, allocator and collectives of a process."""
LOGITS_GIB = 0.5
"""Chunks of logits and of their gradients, beside the peak of a layer: `logprobs.LOGIT_BYTES` twice."""


def trainer_gib(shape: Shape, trainer: TrainerConfig, gpu_gib: float | None = None) -> float:
    """GiB of one rank at its peak: where a later micro-batch's backward begins, or where embedding and head are summed.

    In both: fp32 weights, their gradient and Adam's two moments; the version that is published, in 16 bits; all cut.
    """
    cut = shape.parameters / trainer.ranks
    tokens = trainer.tokens_per_micro_batch
    # Whole gradients are cut, unit by unit, in the last micro-batch alone.
    gradients = 4 * (shape.parameters if keeps_whole_gradients(trainer, shape, gpu_gib) else cut)
    always = gradients + (12 + 2) * cut
    kept = 2 * tokens * shape.hidden * shape.layers  # what goes into each layer
    inner = 2 * tokens * (12 * shape.hidden + 5 * shape.intermediate)  # what one layer does with it
    if not trainer.gradient_checkpointing:
        kept, inner = inner * shape.layers, 0
    ends = 2 * (shape.ends + shape.head)  # embedding and head gathered in bf16, with the head's gradient
    layers = 8 * shape.layer  # one gathered, one on its way, one's gradient in fp32
    backward = kept + inner + ends + layers + LOGITS_GIB * GIB
    return (always + max(backward, 6 * shape.ends)) / GIB + OVERHEAD_GIB


def critic_gib(shape: Shape, critic: CriticConfig) -> float:
    """GiB of a critic at its peak: a trainer of one rank; its head is smaller, which is not counted."""
    same = {name: getattr(critic, name) for name in ("tokens_per_micro_batch", "gradient_checkpointing")}
    return trainer_gib(shape, TrainerConfig(**same))


def keeps_whole_gradients(trainer: TrainerConfig, shape: Shape, gpu_gib: float | None) -> bool:
    """Each rank keeps the gradient of the whole model over a step's micro-batches, on a GPU of ``gpu_gib``."""
    if trainer.ranks == 1 or trainer.sum_gradients == "micro_batch":
        return False
    if trainer.sum_gradients == "step":
        return True
    if gpu_gib is None:
        return False
    free = gpu_gib - OVERHEAD_GIB - 4 * shape.parameters / trainer.ranks / GIB
    return 4 * shape.parameters / GIB <= GRADIENT_SHARE * free
