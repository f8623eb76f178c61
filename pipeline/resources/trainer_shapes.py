"""What shapes a trainer's ranks may take, and what each may spare."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from penstock.services.modeling.decoder_shape import Shape
from penstock.services.runtime.gpu_kinds import MACHINE
from penstock.services.trainer.config import TrainerConfig


def shapes(shape: Shape, plain: TrainerConfig) -> Iterator[TrainerConfig]:
    """Whatever `penstock run` would take of so many ranks, of one adapter or none."""
    powers = [1, 2, 4, 8]
    machines = max(1, plain.ranks // MACHINE)
    degrees = product(
        sorted({1, machines}),
        [size for size in powers if size == 1 or shape.packs],
        [size for size in powers if size == 1 or (shape.tensor and shape.cuts(size) and not plain.lora)],
        [size for size in (*powers, 16, 32, 64) if size == 1 or (shape.experts and not shape.experts % size)],
        [size for size in powers if size == 1 or (shape.staged and size <= min(shape.layers, machines))],
    )
    for replicas, sequence, tensor, expert, stages in degrees:
        shards, left = divmod(plain.ranks, replicas * tensor * stages)
        if left or not shards or shards % sequence or shards % expert or sequence * tensor > MACHINE:
            continue
        if not shape.deals(sequence, tensor):
            continue
        for checkpointing, offload, offload_activations in product(
            (False, "selective", True), offloads(plain, tensor), (False, True)
        ):
            if offload_activations and (tensor > 1 or checkpointing is not True):
                continue
            if plain.tokens_per_mlp and checkpointing == "selective":
                continue
            yield plain.model_copy(
                update={
                    "replicas": replicas,
                    "sequence_parallel": sequence,
                    "tensor_parallel": tensor,
                    "expert_parallel": expert,
                    "pipeline_parallel": stages,
                    "gradient_checkpointing": checkpointing,
                    "offload": offload,
                    "offload_activations": offload_activations,
                    "reshard_after": "layer",
                }
            )


def offloads(trainer: TrainerConfig, tensor: int) -> list[bool | str]:
    """What may lie on the host, ever more: each takes longer."""
    means = ["optimizer"] if trainer.optimizer.visits else []
    return [False, *means, *([True] if tensor == 1 else [])]


def apart(trainer: TrainerConfig) -> int:
    """How many keys are not as in the plainest shape of so many ranks."""
    degrees = (
        trainer.replicas, trainer.sequence_parallel, trainer.tensor_parallel, trainer.expert_parallel,
        trainer.pipeline_parallel,
    )  # fmt: skip
    used = (
        trainer.gradient_checkpointing, trainer.offload, trainer.offload_activations, trainer.reshard_after != "layer",
    )  # fmt: skip
    return sum(degree > 1 for degree in degrees) + sum(map(bool, used))
