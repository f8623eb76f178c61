"""How long a trainer's step takes on GPUs of one kind, at best.

Rooflines: the arithmetic, and the bytes that ranks send each other or their hosts, on paper, each divided by the share
of it that good code is known to reach. None of it was measured here: it is for comparing layouts, not for promises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock.pipeline.resources.trainer_memory import (
    activations,
    coded_matrices,
    frozen_bytes,
    keeps_whole_gradients,
    of_stage,
    state_bytes,
    teacher_bytes,
)
from penstock.protocols.columns import TAUGHT
from penstock.services.modeling.decoder_shape import Shape
from penstock.services.modeling.flops import backward_flops, forward_flops
from penstock.services.runtime.gpu_kinds import MACHINE, Device
from penstock.services.trainer.config import TrainerConfig

FLOPS_SHARE = 0.35
"""Of a GPU's peak that a trainer reaches on long rows."""
LINK_SHARE = 0.6
"""Of what connects GPUs with each other, and with their host, that transfers of a layer reach."""
SELECTIVE_SHARE = 0.15
"""Of a forward pass, that selective checkpointing takes: norms and activations again, which memory bounds."""
HOST_UPDATE_GB_S = 20.0
"""At which a host's processor reads and writes memory for one rank, of eight that share it."""
MEANS_BYTES = 8
"""Of AdamW's two means of a parameter, one way; or of Muon's, there and back."""
UPDATE_BYTES = 28
"""That AdamW reads and writes of a parameter: it, its gradient, and both moments."""
MUON_BYTES = 20
"""That Muon does, beside what it iterates: a parameter, its gradient, and one mean."""

PROMPT = 256
"""Tokens of a prompt, where nobody knows better."""


@dataclass(frozen=True)
class Load:
    """What a step consists of."""

    tokens: float
    """Of the responses of all trajectories."""
    length: float
    """Of a trajectory on average, with its prompt."""
    prompt: float = 0.0
    """Of these, the prompt's."""
    given: float = 0.0
    """Of `tokens`, those of answers that nobody samples."""
    group: int = 1
    """Trajectories that have the same prompt."""
    in_trainer: bool = False
    """The trainer goes over it once more in a reference's place (`reference.in_trainer`)."""

    @property
    def response(self) -> float:
        """Of a trajectory on average, without its prompt."""
        return self.length - self.prompt

    @property
    def groups(self) -> float:
        """How many there are."""
        return self.tokens / self.response / self.group

    def learned_by(self, trainer: TrainerConfig) -> Load:
        """What its backward passes go over: of each group some answers, or all."""
        subset = trainer.algorithm.subset
        if subset is None or subset.keep >= self.group:
            return self
        return replace(self, tokens=self.tokens * subset.keep / self.group, group=subset.keep)

    def prompts(self, shape: Shape, budget: int) -> float:
        """Tokens of prompts in a forward pass over all of it: one for as many of a group as ``budget`` tokens have room
        for, where the model's rows share a prompt; else one for each trajectory."""
        fit = max(1, int((budget - self.prompt) / self.response)) if shape.shares else 1
        return self.groups * math.ceil(self.group / fit) * self.prompt


def train_s(shape: Shape, trainer: TrainerConfig, load: Load, device: Device) -> float:
    """Seconds of a step. A pipeline's stages wait for each other at its begin and at its end, as long as the slowest
    takes for a micro-batch on each of them; what they hand on does not travel beside the arithmetic."""
    stages, each = trainer.pipeline_parallel, of_stage(trainer)
    slowest_s = max(_stage_s(shape.stage(number, stages), each, load, device) for number in range(stages))
    if stages == 1:
        return slowest_s
    passes = _passes(shape, each, load)
    tokens = trainer.tokens_per_micro_batch / trainer.sequence_parallel
    handed_s = 2 * 2 * tokens * shape.hidden / _between(trainer.ranks, device)  # forth and back, in bf16
    return slowest_s * (1 + (stages - 1) / max(1.0, passes)) + passes * handed_s


def _passes(shape: Shape, trainer: TrainerConfig, load: Load) -> float:
    """Micro-batches of a rank, in a step."""
    budget, load = trainer.tokens_per_micro_batch, load.learned_by(trainer)
    passes = (load.tokens + load.prompts(shape, budget)) * trainer.epochs / trainer.ranks / budget
    return passes * trainer.sequence_parallel * trainer.tensor_parallel  # ranks that share a micro-batch


def _passes_before(trainer: TrainerConfig) -> int:
    """Forward passes over a step's tokens, beside those that a backward follows."""
    algorithm = trainer.algorithm
    kept = trainer.updates > 1 and algorithm.needs_proximal
    shown = TAUGHT in algorithm.advantage.given  # the policy is its own teacher, too
    counted = trainer.epochs * (algorithm.picks_tokens + (algorithm.router_balance > 0))
    return kept + shown + algorithm.weighs_policy + counted


def _stage_s(shape: Shape, trainer: TrainerConfig, load: Load, device: Device) -> float:
    """What is gathered of the model travels beside the arithmetic, all else does not."""
    passes = _passes(shape, trainer, load)
    before = (_passes_before(trainer) + load.in_trainer) * _forward_flops(shape, load, trainer.tokens_per_micro_batch)
    load = load.learned_by(trainer)
    forward = _forward_flops(shape, load, trainer.tokens_per_micro_batch)
    flops = trainer.epochs * _flops(shape, trainer, load, forward) + before
    arithmetic = flops / trainer.ranks / (device.tflops * 1e12 * FLOPS_SHARE)
    sums = 0.0 if trainer.lora else 1 if keeps_whole_gradients(trainer, shape, device.gib) else passes
    gathered = _gathered(shape, trainer, passes, sums) / _between(trainer.ranks // trainer.replicas, device)
    gathered += sums * _replicated(shape, trainer) / _between(trainer.ranks, device)
    waits = passes * _shared(shape, trainer) / (device.link_gb_s * 1e9 * LINK_SHARE)
    waits += passes * _routed(shape, trainer) / _between(trainer.expert_parallel, device)
    if trainer.weights_on_host:  # each gathered shard comes from the host, in fp32, and what is summed goes there
        waits += 4 * (_gathers(trainer, passes) + sums) * _cut(shape, trainer) / (device.host_gb_s * 1e9 * LINK_SHARE)
    if trainer.offload_activations:
        kept, _ = activations(replace(shape, longest=0), trainer)  # of a micro-batch as most are
        waits += passes * 2 * kept / (device.host_gb_s * 1e9 * LINK_SHARE)
    updates = trainer.updates * _update_s(shape, trainer, device)
    return max(arithmetic, gathered) + waits + updates


def _update_s(shape: Shape, trainer: TrainerConfig, device: Device) -> float:
    """Seconds of an optimizer's step: what it reads and writes; of Muon, whose matrices go to a rank each, also how
    they get there and back, and the arithmetic of its iteration, where it is no adapter's."""
    lora = trainer.lora
    trained = _learned(shape, trainer)
    bytes_s = (HOST_UPDATE_GB_S if trainer.weights_on_host else device.gb_s * LINK_SHARE) * 1e9
    by_host = device.host_gb_s * 1e9 * LINK_SHARE
    visit_s = MEANS_BYTES / by_host if trainer.means_on_host else 0.0  # in and out at once
    if trainer.optimizer.type != "muon":
        return trained * max(UPDATE_BYTES / bytes_s, visit_s)
    ends = 0 if lora else shape.ends * trainer.replicas / trainer.ranks
    seconds = (MUON_BYTES * (trained - ends) + UPDATE_BYTES * ends) / bytes_s
    seconds += visit_s * trained
    if lora:
        return seconds
    shared = (shape.layers * shape.shared + shape.mixtures * shape.router) * trainer.replicas / trainer.ranks
    alone = trainer.replicas / trainer.ranks
    seconds += 2 * 2 * shared * (1 - alone) / _between(trainer.ranks // trainer.replicas, device)  # in bf16
    if trainer.weights_on_host:
        seconds += 2 * 2 * (trained - ends) / by_host
    flops = trainer.optimizer.newton_schulz * alone * _iteration_flops(shape)
    return seconds + flops / (device.tflops * 1e12 * FLOPS_SHARE)


def _iteration_flops(shape: Shape) -> float:
    """Of one step of Newton-Schulz of all matrices: X Xᵀ, its square, and what that does to X."""

    def of(one: int, other: int) -> float:
        small, large = sorted((one, other))
        return 4 * small**2 * large + 2 * small**3

    experts = 3 * shape.mixtures * shape.experts * of(shape.hidden, shape.intermediate)
    return experts + shape.layers * sum(m.share * of(m.inputs, m.outputs) for m in shape.matrices.values())


def forward_s(shape: Shape, gpus: int, load: Load, device: Device, budget: int) -> float:
    """Seconds that a critic, or references, take on so many GPUs for a step's values, or log-probabilities: a forward
    pass, of ``budget`` tokens at a time, and nothing that has to travel."""
    return _forward_flops(shape, load, budget) / gpus / (device.tflops * 1e12 * FLOPS_SHARE)


def switch_s(shape: Shape, trainer: TrainerConfig, tensor: int, device: Device) -> float:
    """Seconds of a step in which GPUs change hands (`run.placement`: colocated): what a trainer's rank keeps between
    two steps goes to its host and comes back, and so do an engine's weights, cut over ``tensor`` GPUs."""
    engine = 2 * shape.parameters * shape.served_bytes / tensor
    return rest_s(shape, trainer, device) + engine / (device.host_gb_s * 1e9 * LINK_SHARE)


def rest_s(shape: Shape, trainer: TrainerConfig, device: Device) -> float:
    """The same of one learner alone."""
    lora, (frozen, codes) = trainer.lora, frozen_bytes(shape, trainer)
    trained = _learned(shape, trainer)
    ends = 0 if lora else shape.ends * trainer.replicas / trainer.ranks
    if trainer.weights_on_host:
        return codes / trainer.ranks / (device.host_gb_s * 1e9 * LINK_SHARE)
    still = codes + frozen  # it comes back, and does not go: it is there
    kept = 4 * trained if trainer.offload else state_bytes(trainer.optimizer, trained, ends)
    kept += teacher_bytes(trainer, trained) + 4 * (_cut(shape, trainer) - trained) * (not lora)
    return (2 * kept + still / trainer.ranks) / (device.host_gb_s * 1e9 * LINK_SHARE)


def _forward_flops(shape: Shape, load: Load, budget: int) -> float:
    """Of a step: a token sees half of those around it, and a response's its prompt. The head is for responses alone."""
    prompts = load.prompts(shape, budget)
    pairs = load.tokens * (load.prompt + load.response / 2) + prompts * load.prompt / 2
    return forward_flops(shape, load.tokens + prompts, load.tokens, pairs)


def _flops(shape: Shape, trainer: TrainerConfig, load: Load, forward: float) -> float:
    """Of a step, with this ``forward`` pass and a backward one."""
    again = float(bool(trainer.gradient_checkpointing))
    if trainer.gradient_checkpointing == "selective":  # of a mixture, the experts are computed again
        tokens = load.tokens + load.prompts(shape, trainer.tokens_per_micro_batch)
        again = SELECTIVE_SHARE + 2 * shape.mixtures * shape.chosen * shape.expert * tokens / forward
    if trainer.tokens_per_mlp:
        tokens = load.tokens + load.prompts(shape, trainer.tokens_per_micro_batch)
        again += 2 * shape.layers * shape.between * tokens / forward
    return forward * (1 + again) + backward_flops(forward, trainer.lora is not None)


def _cut(shape: Shape, trainer: TrainerConfig) -> float:
    """Parameters of one rank."""
    return shape.parameters * trainer.replicas / trainer.ranks


def _learned(shape: Shape, trainer: TrainerConfig) -> float:
    """Parameters of one rank that have a gradient."""
    if lora := trainer.lora:
        return shape.adapter(lora.rank, lora.targets, lora.exclude) / trainer.ranks
    return _cut(shape, trainer) * (1 - shape.frozen * bool(trainer.freeze) / shape.parameters)


def _gathered(shape: Shape, trainer: TrainerConfig, passes: float, sums: float) -> float:
    """Bytes that a rank sends of the model: layers in bf16, twice in each micro-batch, or once in that, or in an
    update; in each sum gradients in fp32."""
    shards = trainer.shards
    experts = shape.mixtures * shape.experts * shape.expert
    own = experts / trainer.expert_parallel
    model = (shape.parameters - experts) / trainer.tensor_parallel
    sent = model * (1 - 1 / shards) + own * (1 - trainer.expert_parallel / shards)
    coded = shape.layers * sum(matrix.numbers for matrix in coded_matrices(shape, trainer.lora))
    of_layers = sent - coded / trainer.tensor_parallel * (1 - 1 / shards)  # what lies in 4 bits is on each rank
    return 2 * _gathers(trainer, passes) * of_layers + 4 * sums * sent


def _gathers(trainer: TrainerConfig, passes: float) -> float:
    """How often a layer is gathered in a step of so many micro-batches."""
    return {"layer": 2 * passes, "micro_batch": passes, "update": float(trainer.updates)}[trainer.reshard_after]


def _replicated(shape: Shape, trainer: TrainerConfig) -> float:
    """Bytes of gradients that a rank sends to its fellows in other replicas."""
    return 8 * _cut(shape, trainer) * (1 - 1 / trainer.replicas)


def _shared(shape: Shape, trainer: TrainerConfig) -> float:
    """Bytes that a rank sends of a micro-batch's tokens to those that share its matrices, or its rows."""
    tokens = trainer.tokens_per_micro_batch / trainer.sequence_parallel
    times = 3 if trainer.gradient_checkpointing is True else 2
    tensor = 2 * 2 * (1 - 1 / trainer.tensor_parallel) * 2 * tokens * shape.hidden  # two sums of each layer's output
    heads = (2 * shape.heads + 2 * max(shape.kv_heads, trainer.sequence_parallel)) * shape.head_dim
    sequence = (1 - 1 / trainer.sequence_parallel) * 2 * tokens * heads / trainer.tensor_parallel
    return times * shape.layers * (tensor + sequence)


def _routed(shape: Shape, trainer: TrainerConfig) -> float:
    """Bytes that a rank sends of a micro-batch's tokens to experts of other ranks, and back."""
    tokens = trainer.tokens_per_micro_batch / trainer.sequence_parallel
    times = 3 if trainer.gradient_checkpointing else 2
    away = 1 - 1 / trainer.expert_parallel
    return times * 2 * away * 2 * tokens * shape.chosen * shape.hidden * shape.mixtures


def _between(ranks: int, device: Device) -> float:
    """Bytes/s of each of so many ranks: within a machine, or between several."""
    gb_s = device.link_gb_s if ranks <= MACHINE else min(device.link_gb_s, device.network_gb_s)
    return gb_s * 1e9 * LINK_SHARE
