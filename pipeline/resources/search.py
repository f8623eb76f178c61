"""How a run could be laid out on so many GPUs of one kind: what fits, and how long a step would take at best.

Times are rooflines: what the arithmetic and the memory's traffic take on paper, divided by `FLOPS_SHARE` and
`BANDWIDTH_SHARE`, which are what good code is known to reach; none of them was measured here. They are for comparing
layouts, not for promises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from penstock.pipeline.config import Config
from penstock.pipeline.resources.devices import Device
from penstock.pipeline.resources.memory import reference_gib
from penstock.pipeline.resources.model_shape import Shape
from penstock.pipeline.resources.trainer_memory import GIB, OVERHEAD_GIB, critic_gib, trainer_gib
from penstock.protocols.versions import DTYPE_BYTES
from penstock.services.rollout.config import VllmEngineConfig
from penstock.services.trainer.config import LoraConfig, TrainerConfig

FLOPS_SHARE = 0.35
"""Of a GPU's peak that a trainer reaches on long rows."""
BANDWIDTH_SHARE = 0.5
"""Of its memory's that an engine reaches while it decodes."""
VLLM_SHARE = 0.9
LEAST_SEQUENCES = 8
"""An engine with less room than for so many of the longest sequences is not worth its GPU."""


@dataclass(frozen=True)
class Layout:
    """One way to lay a run out."""

    ranks: int
    checkpointing: bool
    lora: LoraConfig | None
    rollouts: int
    tensor_parallel: int
    trainer_gib: float
    train_s: float
    """Seconds of a step that the trainer takes; and that all rollouts together take."""
    generate_s: float

    @property
    def step_s(self) -> float:
        """While one step is trained on the next is generated."""
        return max(self.train_s, self.generate_s)

    @property
    def synchronous_s(self) -> float:
        """With gate.max_lag=0: one after the other."""
        return self.train_s + self.generate_s


@dataclass(frozen=True)
class Load:
    """What a step consists of."""

    tokens: float
    """Sampled, in all trajectories."""
    length: float
    """Of a trajectory on average, with its prompt."""


def layouts(config: Config, shape: Shape, count: int, device: Device, load: Load) -> Iterator[Layout]:
    """All that fit ``count`` of ``device``."""
    others = config.reference.count * config.with_reference + config.critic.ranks * config.with_critic
    if config.with_reference and reference_gib(shape, config) > device.gib:
        return
    if config.with_critic and critic_gib(shape, config.critic, device.gib) > device.gib:
        return
    adapters = [config.trainer.lora] if config.trainer.lora else [None, LoraConfig()]
    vllm = config.rollout.engine if isinstance(config.rollout.engine, VllmEngineConfig) else None
    tensors = [size for size in _tensor_parallel(config, shape, device) if size == 1 or vllm]
    if vllm and any(int(vllm.vllm.get(f"{kind}_parallel_size", 1)) > 1 for kind in ("data", "pipeline")):
        return  # each engine has more GPUs than are searched for
    for lora, ranks in product(adapters, [*range(1, min(16, count)), *range(16, count, 8)]):
        if not _takes(config.trainer, ranks, lora):
            continue
        trained = _trained(config, shape, ranks, lora, device)
        if trained is None:
            continue
        checkpointing, need = trained
        seconds = train_s(
            shape, load.tokens, load.length, ranks, checkpointing, lora is not None, device, config.trainer.epochs
        )
        engines = [
            (_generate_s(config, shape, load, tensor, device, rollouts), tensor, rollouts)
            for tensor in tensors
            if (rollouts := (count - others - ranks) // tensor) >= 1
        ]
        if engines:
            generate_s, tensor, rollouts = min(engines)
            yield Layout(ranks, checkpointing, lora, rollouts, tensor, need, seconds, generate_s)


def _takes(trainer: TrainerConfig, ranks: int, lora: LoraConfig | None) -> bool:
    """The config would not be refused."""
    if ranks % (trainer.replicas * trainer.sequence_parallel * trainer.tensor_parallel):
        return False
    shards = ranks // (trainer.replicas * trainer.tensor_parallel)
    return not shards % trainer.expert_parallel and not (lora and trainer.tensor_parallel > 1)


def _trained(
    config: Config, shape: Shape, ranks: int, lora: LoraConfig | None, device: Device
) -> tuple[bool, float] | None:
    """Whether so many ranks need checkpointing, which is slower, and GiB of each; None where they do not fit."""
    for checkpointing in (False, True):
        update = {"ranks": ranks, "gradient_checkpointing": checkpointing, "lora": lora}
        need = trainer_gib(shape, config.trainer.model_copy(update=update), device.gib)
        if need <= device.gib:
            return checkpointing, need
    return None


def _tensor_parallel(config: Config, shape: Shape, device: Device) -> Iterator[int]:
    """GPUs that one engine may have."""
    for tensor in (2**power for power in range(4)):
        if shape.heads % tensor or (shape.kv_heads % tensor and tensor % shape.kv_heads):
            continue
        if sequences(config, shape, tensor, device, _longest(config, shape)) >= LEAST_SEQUENCES:
            yield tensor


def _longest(config: Config, shape: Shape) -> float:
    return float(min(getattr(config.rollout.engine, "max_length", shape.max_length), shape.max_length))


def sequences(config: Config, shape: Shape, tensor: int, device: Device, length: float) -> float:
    """Of ``length`` tokens, that the KV of one engine has room for."""
    weights = shape.parameters * DTYPE_BYTES[config.model.dtype] / GIB / tensor
    token = shape.kv_bytes(config.model.dtype) / min(tensor, shape.kv_heads) / GIB
    return max(0.0, device.gib * VLLM_SHARE - weights - OVERHEAD_GIB) / token / length


def train_s(
    shape: Shape, tokens: float, length: float, ranks: int, checkpointing: bool, lora: bool, device: Device, epochs: int
) -> float:
    """Seconds that ``ranks`` train on so many ``tokens``, of trajectories of this ``length``."""
    forward = 2 * shape.met + 2 * shape.layers * shape.heads * shape.head_dim * length
    backward = 2 if not lora else 1  # a frozen matrix has no gradient of its own
    flops = tokens * forward * (1 + backward + checkpointing) * epochs
    return flops / (ranks * device.tflops * 1e12 * FLOPS_SHARE)


def _generate_s(config: Config, shape: Shape, load: Load, tensor: int, device: Device, engines: int) -> float:
    """Of engines that share a step: every decoding step reads the weights, and the KV of who is decoded."""
    most = getattr(config.rollout.engine, "max_sequences", 256)
    tokens = load.tokens / engines
    batch = max(1.0, min(most, sequences(config, shape, tensor, device, load.length), tokens / load.length))
    weights = shape.parameters * DTYPE_BYTES[config.model.dtype] / tensor
    kv = batch * load.length / 2 * shape.kv_bytes(config.model.dtype) / min(tensor, shape.kv_heads)
    read_s = (weights + kv) / (device.gb_s * 1e9 * BANDWIDTH_SHARE)
    compute_s = batch * 2 * shape.met / (tensor * device.tflops * 1e12 * FLOPS_SHARE)
    return tokens / batch * max(read_s, compute_s)
