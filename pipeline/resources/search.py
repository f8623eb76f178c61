"""How a run could be laid out on so many GPUs of one kind: what fits, and how long a step would take at best.

Times are rooflines, of which none was measured here (`resources.step_time`): they are for comparing layouts, not for
promises.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import count, product

from pydantic import ValidationError

from penstock.pipeline.config import Config
from penstock.pipeline.config.colocated import check_colocated
from penstock.pipeline.resources.gpus import gpus_but
from penstock.pipeline.resources.layout import Layout, seconds_of
from penstock.pipeline.resources.loads import most_at_once
from penstock.pipeline.resources.memory import (
    SHARE_STEP,
    critic_gib,
    critic_of,
    critics_each,
    embedded_gib,
    kv_tokens,
    mapped_gib,
    too_large,
    trainer_of,
)
from penstock.pipeline.resources.model_shape import critic_shape, shape_of
from penstock.pipeline.resources.placement import guests_beside_rollouts, sharers
from penstock.pipeline.resources.readers import readers_each
from penstock.pipeline.resources.step_time import FLOPS_SHARE, Load, forward_s, rest_s, switch_s, train_s
from penstock.pipeline.resources.trainer_memory import OVERHEAD_GIB, trainer_gib
from penstock.pipeline.resources.trainer_shapes import apart, offloads, shapes
from penstock.services.modeling.decoder_shape import Shape
from penstock.services.modeling.filling import PASSES_EACH
from penstock.services.modeling.lengths import longest_sequence
from penstock.services.rollout.config import VLLM_DEFAULT, TorchEngineConfig, VllmEngineConfig
from penstock.services.runtime import registry
from penstock.services.runtime.gpu_kinds import MACHINE, Device
from penstock.services.trainer.config import LoraConfig, TrainerConfig

BANDWIDTH_SHARE = 0.5
"""Of a GPU's memory's that an engine reaches while it decodes."""
FILL = 0.95
"""Of a GPU's memory that a trainer may need by the plan: allocators leave gaps, and routing is not even."""
LEAST_SEQUENCES = 8
"""An engine with less room than for so many of the longest sequences is not worth its GPU."""
PLAINER = 1.02
"""A plainer shape, or fewer references, are taken where another is at most this much faster, on paper."""


def layouts(config: Config, shape: Shape, count: int, device: Device, load: Load) -> Iterator[Layout]:
    """For each number of the trainer's ranks the fastest shape that fits, with references and rollouts on all other
    GPUs of ``count``; then the fastest of all, with both on the same GPUs. Of what ``config`` trains, and of less. None
    where `unsearched` says why."""
    if unsearched(config, device):
        return
    yield from _layouts(config, shape, count, device, load)
    if smaller := in_four_bits(config):
        yield from _layouts(smaller, shape, count, device, load)


def in_four_bits(config: Config) -> Config | None:
    """``config`` with an adapter beside a model in 4 bits, which needs least; None where it has one, cannot, or wants
    none."""
    given = {"rank": LoraConfig().rank} if config.trainer.lora is None else config.trainer.lora.model_dump()
    beside = getattr(config.rollout.engine, "adapter", "merged") != "merged"
    if beside or config.trainer.wants_whole or (config.trainer.lora and config.trainer.lora.quantize):
        return None
    try:
        lora = LoraConfig.model_validate(given | {"quantize": "nf4"})
    except ValidationError:
        return None
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"lora": lora})})


def _layouts(config: Config, shape: Shape, count: int, device: Device, load: Load) -> Iterator[Layout]:
    adapters = [None, LoraConfig()]
    if config.trainer.lora or config.trainer.wants_whole:
        adapters = [config.trainer.lora]
    tensors, (values, learns) = [*_tensor_parallel(config, shape, device)], critic_times(config, load, device)
    apart = sum(program.gpus for program in config.sleepers.values())  # which have their own where nobody takes turns
    for lora, ranks in product(adapters, _ranks(count)):
        dealt = [*_dealt(config, shape, count - apart - ranks, device, load, tensors)]
        plain = _plain(config, ranks, lora)
        if dealt and (found := _fastest(config, shape, plain, load, device)):
            trainer, seconds, faster, faster_s = found
            own_gib = _rank_gib(config, shape, trainer, device)
            faster_gib = _rank_gib(config, shape, faster, device) if faster else 0.0
            yield _fewest(config, [
                Layout(
                    trainer, own_gib, seconds, generate_s, rollouts, tensor, faster, faster_gib, faster_s,
                    values_s=values, critic_s=learns, references=references, reference_s=reference_s,
                )
                for references, reference_s, generate_s, tensor, rollouts in dealt
            ])  # fmt: skip

    try:
        check_colocated(config)
    except ValueError:
        return
    for lora in adapters:
        yield from _colocated(config, shape, count, device, load, tensors, lora)


def _dealt(
    config: Config, shape: Shape, left: int, device: Device, load: Load, tensors: Sequence[int]
) -> Iterator[tuple[int, float, float, int, int]]:
    """Ways to deal the GPUs that a trainer has ``left``: references, their seconds, the rollouts', GPUs of each of
    their engines, and how many there are."""
    alone_s = reference_s(config, load, device)
    for references in _references(config, left):
        beside = left - gpus_but(with_references(config, references), ("trainer", "rollout"))
        engines = [
            (_generate_s(config, shape, load, tensor, device, beside // tensor), tensor, beside // tensor)
            for tensor in tensors
            if beside >= tensor
        ]
        if engines:
            yield references, alone_s / max(1, references), *min(engines)


def _references(config: Config, most: int) -> list[int]:
    """Numbers of them that are tried, the fewest first: as many as ``config`` has, where their time is not known."""
    given, most = config.reference.count * config.with_reference, most // config.reference.gpus
    if not given or config.reference.device == "cpu" or shape_of(config, config.reference.path) is None:
        return [given]
    return sorted({given, most, *(2**power for power in range(most.bit_length()))})


def _fewest(config: Config, layouts: Sequence[Layout]) -> Layout:
    """The fastest of these, which have more and more references."""
    seconds = seconds_of(config)
    return min(enumerate(layouts), key=lambda each: seconds(each[1]) * PLAINER ** each[0])[1]


def with_references(config: Config, count: int) -> Config:
    """``config`` with so many references; none: there is none in it."""
    if not count:
        return config
    return config.model_copy(update={"reference": config.reference.model_copy(update={"count": count})})


def unsearched(config: Config, device: Device) -> str | None:
    """Why there is no layout of this config whatever the number of GPUs."""
    engine = config.rollout.engine
    if config.rollout.all_given:
        return "rollout.given.answers: every answer is given, so that no GPU is needed but the trainer's"
    if isinstance(engine, VllmEngineConfig):
        by_hand = "or lay the run out by hand (run.placement=as_given)"
        for name in ("data_parallel_size", "pipeline_parallel_size"):
            if int(engine.vllm.get(name, 1)) > 1:
                return (
                    f"rollout.engine.vllm.{name}={engine.vllm[name]}: layouts are searched for engines without it; "
                    f"set it to 1, {by_hand}"
                )
        if name := engine.unsized or "":
            return (
                f"rollout.engine.vllm.{name}={engine.vllm[name]}: what memory an engine takes with it is not known; "
                f"leave it out, {by_hand}"
            )
    return next(iter(too_large(config, device.gib)), None)


def critic_times(config: Config, load: Load, device: Device) -> tuple[float, float]:
    """Seconds of a step until the critic has said its values, and more until it has learned from it, which it does
    beside the trainer; zeros where there is none, or the sizes of its model are not known here."""
    shape = critic_shape(config) if config.with_critic else None
    if shape is None:
        return 0.0, 0.0
    critic = critic_of(config)
    values = forward_s(shape, critic.ranks, load, device, critic.tokens_per_micro_batch)
    return values, train_s(shape, critic, load, device)


def reference_s(config: Config, load: Load, device: Device) -> float:
    """Seconds of a step that one reference alone would take; 0 where there is none on a GPU, or the sizes of its model
    are not known here."""
    shape = shape_of(config, config.reference.path) if config.with_reference else None
    if shape is None or config.reference.device == "cpu":
        return 0.0
    gpus = config.reference.gpus
    # Passes go through its GPUs one after the other: the first and the last ones leave some of them idle.
    idle = 1 + (gpus - 1) / (gpus * PASSES_EACH)
    return idle * forward_s(shape, gpus, load, device, config.reference.tokens_per_batch)


def _plain(config: Config, ranks: int, lora: LoraConfig | None) -> TrainerConfig:
    return trainer_of(config).model_copy(update={"ranks": ranks, "nodes": max(1, ranks // MACHINE), "lora": lora})


def _colocated(
    config: Config, shape: Shape, count: int, device: Device, load: Load, tensors: Sequence[int],
    lora: LoraConfig | None,
) -> Iterator[Layout]:  # fmt: skip
    """Rollouts, references, and a critic, on the GPUs of a trainer that has all that no scorer has."""
    ranks = count - gpus_but(config, ("trainer", *sharers(config)))
    specs = registry.actors(config)
    wide = [specs[kind].gpus(config) for kind in guests_beside_rollouts(config)]
    wide += [program.gpus for program in config.sleepers.values()]
    if ranks < 1 or (ranks > MACHINE and ranks % MACHINE) or max(wide, default=0) > min(ranks, MACHINE):
        return
    (each, beside), critics = readers_each(config, ranks), critics_each(config)
    room = (device.gib - (1 + critics) * OVERHEAD_GIB - beside) / device.gib
    share = min(VLLM_DEFAULT, int(room / SHARE_STEP) * SHARE_STEP)
    asleep = (1 + each + critics) * OVERHEAD_GIB
    if share <= 0 or (critics and not _critic_fits(config, ranks, device, asleep)):
        return
    critic_s = critic_rest_s(config, device) * critics
    engines = [
        (_generate_s(config, shape, load, tensor, device, ranks // tensor, share), tensor)
        for tensor in tensors
        if ranks >= tensor and _has_room(config, shape, tensor, device, share)
    ]
    found = _fastest(config, shape, _plain(config, ranks, lora), load, device, asleep, colocated=True)
    if engines and found:
        trainer, seconds, faster, faster_s = found
        own_gib = _rank_gib(config, shape, trainer, device, True)
        faster_gib = _rank_gib(config, shape, faster, device, True) if faster else 0.0
        # On a GPU that has none yet one more takes no more memory of it.
        alone = not any(not scorer.own_gpus for scorer in config.scorers.values())
        most = ranks // config.reference.gpus
        more = [n for n in _references(config, ranks) if alone and config.reference.count <= n <= most]
        yield _fewest(config, [
            min((
                Layout(
                    trainer, own_gib, seconds, generate_s, ranks // tensor, tensor, faster, faster_gib, faster_s, True,
                    round(share, 2), switch_s(shape, trainer, tensor, device) + critic_s,
                    *critic_times(config, load, device), bool(critics), references,
                    _held_s(config, load, device, references, ranks, tensor),
                )
                for generate_s, tensor in engines
            ), key=seconds_of(config))
            for references in more or [config.reference.count * config.with_reference]
        ])  # fmt: skip


def _critic_fits(config: Config, ranks: int, device: Device, asleep_gib: float) -> bool:
    """Beside who sleeps on the GPUs of so many of the trainer's ``ranks``, of one machine."""
    need = critic_gib(config, device.gib) or 0.0
    return config.critic.ranks <= ranks <= MACHINE and need <= device.gib * FILL - asleep_gib


def critic_rest_s(config: Config, device: Device) -> float:
    """Seconds of a step in which what a critic's rank keeps goes to its host and comes back; 0 where the sizes of its
    model are not known here."""
    shape = critic_shape(config)
    return rest_s(shape, critic_of(config), device) if shape else 0.0


def _held_s(config: Config, load: Load, device: Device, references: int, ranks: int, tensor: int) -> float:
    """Seconds of a step that references hold up the engine on ``tensor`` of a trainer's GPUs that has most of them
    beside it: it waits for each of its GPUs, and they are seldom at work together."""
    beside = min(references, tensor * -(-references * config.reference.gpus // ranks))
    return reference_s(config, load, device) * beside / max(1, references)


def _ranks(count: int) -> Iterator[int]:
    """Numbers of ranks that are tried: any in a machine, then whole machines, more and more of them."""
    ranks = 1
    while ranks < count:
        yield ranks
        ranks += 1 if ranks < MACHINE else MACHINE * (1 + ranks // (16 * MACHINE))


def _rank_gib(config: Config, shape: Shape, trainer: TrainerConfig, device: Device, colocated: bool = False) -> float:
    """Of one rank at its peak, with the versions that engines map."""
    if colocated:
        return trainer_gib(shape, trainer, device.gib, "bucket")
    return trainer_gib(shape, trainer, device.gib) + mapped_gib(config, shape, trainer)


def _fastest(
    config: Config,
    shape: Shape,
    plain: TrainerConfig,
    load: Load,
    device: Device,
    taken_gib: float = 0.0,
    colocated: bool = False,
) -> tuple[TrainerConfig, float, TrainerConfig | None, float] | None:
    """The fastest shape of so many ranks that fits beside ``taken_gib``, and its seconds; then the fastest that does
    not, where that would be faster. None: nothing fits."""
    tried: list[tuple[float, int, float, TrainerConfig]] = []
    numbers = count()

    def try_(trainer: TrainerConfig) -> None:
        seconds = train_s(shape, trainer, load, device)
        heapq.heappush(tried, (seconds * PLAINER ** apart(trainer), next(numbers), seconds, trainer))
        if trainer.shards > 1 and trainer.reshard_after == "layer":
            kept = trainer.model_copy(update={"reshard_after": "update"})
            if train_s(shape, kept, load, device) * PLAINER < seconds:  # ranks wait for what they gather
                try_(kept)

    for trainer in shapes(shape, plain):
        if not trainer.offload:
            try_(trainer)
    faster, faster_s = None, 0.0
    while tried:
        _, _, seconds, trainer = heapq.heappop(tried)
        if _rank_gib(config, shape, trainer, device, colocated) <= device.gib * FILL - taken_gib:
            return trainer, seconds, faster, faster_s
        if faster is None:
            faster, faster_s = trainer, seconds
        if not trainer.offload:  # what spares more is slower, so it was not worth a look before
            for offload in offloads(trainer, trainer.tensor_parallel)[1:]:
                try_(trainer.model_copy(update={"offload": offload}))
    return None


def _tensor_parallel(config: Config, shape: Shape, device: Device) -> Iterator[int]:
    """GPUs that one engine may have."""
    vllm = isinstance(config.rollout.engine, VllmEngineConfig)
    for tensor in (2**power for power in range(4 if vllm else 1)):
        if shape.deals(tensor) and _has_room(config, shape, tensor, device):
            yield tensor


def _has_room(config: Config, shape: Shape, tensor: int, device: Device, share: float = VLLM_DEFAULT) -> bool:
    """An engine is worth its GPUs, of which it may take a ``share`` of the memory."""
    engine = config.rollout.engine
    if isinstance(engine, TorchEngineConfig):
        return embedded_gib(config, shape) <= device.gib * share
    longest = float(longest_sequence(engine, shape.max_length) or shape.max_length)
    return sequences(config, shape, tensor, device, longest, share) >= LEAST_SEQUENCES


def sequences(
    config: Config, shape: Shape, tensor: int, device: Device, length: float, share: float = VLLM_DEFAULT
) -> float:
    """Of ``length`` tokens, that the KV of one engine has room for in its ``share`` of GPUs. The embedded one keeps a
    slot of its longest for each, beside two versions."""
    engine = config.rollout.engine
    if isinstance(engine, TorchEngineConfig):
        return kv_tokens(shape, device.gib * share, versions=2, length=engine.max_length) / engine.max_length
    options = engine.vllm if isinstance(engine, VllmEngineConfig) else {}
    stages = int(options.get("pipeline_parallel_size", 1))
    return kv_tokens(shape, device.gib * share, tensor, stages, length=length) / length


def _generate_s(
    config: Config, shape: Shape, load: Load, tensor: int, device: Device, engines: int, share: float = VLLM_DEFAULT
) -> float:
    """Of engines that share a step: every decoding step reads the weights, and the KV of who is decoded. A group's
    prompt is computed once."""
    most = most_at_once(config)
    tokens, response = (load.tokens - load.given) / engines, load.response
    fit = sequences(config, shape, tensor, device, load.length, share)
    batch = max(1.0, min(most, fit, tokens / response))
    weights = shape.parameters * shape.served_bytes / tensor
    kv = batch * (load.prompt + response / 2) * shape.kv_bytes / shape.kv_ranks(tensor)
    read_s = (weights + kv) / (device.gb_s * 1e9 * BANDWIDTH_SHARE)
    token_s = 2 * shape.met / (tensor * device.tflops * 1e12 * FLOPS_SHARE)
    prompts_s = load.groups * load.prompt / engines * token_s
    return tokens / batch * max(read_s, batch * token_s) + prompts_s
