"""Which layout to take of those that fit, and why; and the one that `run.placement: auto` takes on this machine."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.pipeline.config import Config, ConfigError, TinyModel
from penstock.pipeline.config.load import as_overrides
from penstock.pipeline.resources.gpus import gpus_but
from penstock.pipeline.resources.layout import Layout, seconds_of
from penstock.pipeline.resources.loads import half_of_the_longest, load_of
from penstock.pipeline.resources.model_shape import shape_of
from penstock.pipeline.resources.placement import guests_beside_rollouts, sharers
from penstock.pipeline.resources.readers import uncounted
from penstock.pipeline.resources.search import in_four_bits, layouts, unsearched, with_references
from penstock.services.rollout.config import TorchEngineConfig, VllmEngineConfig
from penstock.services.runtime import registry
from penstock.services.runtime.gpu_kinds import MACHINE, Device, device_called
from penstock.services.runtime.gpus import chosen_gpus
from penstock.services.trainer.config import TrainerConfig

SEARCHED = (
    "ranks", "nodes", "replicas", "sequence_parallel", "tensor_parallel", "expert_parallel", "pipeline_parallel",
    "gradient_checkpointing", "offload", "offload_activations", "reshard_after",
)  # fmt: skip
"""Keys of `trainer` that the search chooses."""


PLACED = ("trainer", "rollout", "reference", "critic")
"""Kinds of actors that a layout has GPUs for."""


@dataclass(frozen=True)
class Choice:
    """What `run.placement: auto` makes of a config."""

    overrides: tuple[str, ...]
    before: tuple[str, ...]
    """Overrides that take these back."""
    line: str
    """What it is, and why, for people."""


def choose(config: Config) -> Choice:
    """The layout of ``config`` on the GPUs that this machine has. Raises `ConfigError` where none fits, or they are of
    a kind that is not known."""
    gpus = [*chosen_gpus().values()]
    if config.run.elsewhere:
        raise ConfigError(
            f"run.placement: auto lays out the GPUs of one machine, and run.elsewhere={list(config.run.elsewhere)} has "
            "others start some processes; take what `penstock plan FILE --gpus …` says, and as_given"
        )
    if sleeps := next((name for name, program in config.programs.items() if program.sleep), ""):
        raise ConfigError(
            f"programs.{sleeps}.sleep: run.placement=auto does not lay out programs that sleep; take what `penstock "
            "plan FILE run.placement=colocated --gpus …` says, or leave sleep and wake out"
        )
    if not gpus or isinstance(config.model, TinyModel):
        what = "model.type=tiny fits anywhere" if gpus else "there is no GPU"
        return Choice((), (), f"run.placement: auto leaves everything as the file says: {what}")
    device = device_called(gpus[0].name, gpus[0].total_gib)
    if device is None or any(device_called(gpu.name, gpu.total_gib) != device for gpu in gpus):
        kinds = ", ".join(dict.fromkeys(f"{gpu.name} ({gpu.total_gib:.0f} GiB)" for gpu in gpus))
        raise ConfigError(f"run.placement: auto needs GPUs of one kind that is known, not {kinds}; set it to as_given")
    shape = shape_of(config)
    if shape is None:
        raise ConfigError("run.placement: auto needs the model's sizes, and there is no config.json at model.path")
    device = replace(device, gib=min(gpu.total_gib for gpu in gpus))  # the driver keeps a part
    found = layouts(config, shape, len(gpus), device, load_of(config, half_of_the_longest(config)))
    every = [_on_one_node(layout) for layout in found if trained(layout.trainer) == trained(config.trainer)]
    if not every:
        less = "; an adapter needs less: trainer.lora={rank: 32, quantize: nf4}" if in_four_bits(config) else ""
        raise ConfigError(f"run.placement: auto: {nothing_fits(config, len(gpus), device)}{less}")
    best, why = best_of(config, every)
    taken = overrides(config, best)
    title = f"run.placement: auto takes {shlex.join(taken)} on {len(gpus)} x {device.name}, the fastest on paper"
    said = "; ".join(filter(None, [title, *why, uncounted(config)]))
    return Choice(tuple(taken), tuple(_as_given(config, taken)), said)


def _on_one_node(layout: Layout) -> Layout:
    """The search deals more than eight GPUs over machines; these are in one."""
    return replace(layout, trainer=layout.trainer.model_copy(update={"nodes": 1}))


def _as_given(config: Config, taken: Sequence[str]) -> list[str]:
    """The keys of ``taken`` as ``config`` has them."""
    given = {}
    for key in (word.partition("=")[0] for word in taken):
        value: Any = config
        parts = key.split(".")
        while parts and not isinstance(value, dict):  # an engine's own arguments are given back together
            value = getattr(value, parts.pop(0))
        given[".".join(key.split(".")[: -len(parts) or None])] = value
    return as_overrides(given)


def nothing_fits(config: Config, count: int, device: Device) -> str:
    """For people."""
    if why := unsearched(config, device):
        return f"no layout was looked for on {count} x {device.name}: {why}"
    static, shape = isinstance(config.rollout.engine, TorchEngineConfig), shape_of(config)
    batches = shape is None or shape.longest < config.trainer.tokens_per_micro_batch
    ranks = config.critic.ranks if config.with_critic else 0
    fewer = f"fewer critic.ranks than {ranks}, " * (ranks > count)
    return (
        f"nothing fits {count} x {device.name} of {device.gib:.3g} GiB: take more of them, or larger ones; "
        f"{fewer}{'fewer trainer.tokens_per_micro_batch, ' * batches}{'fewer rollout.engine.max_sequences, ' * static}"
        f"{'or ' * (batches or static)}a shorter rollout.engine.max_length need less"
    )


TRAINED = ("training all weights", "training an adapter (LoRA)", "training an adapter of a model in 4 bits (QLoRA)")


def trained(trainer: TrainerConfig) -> int:
    """What is: its number in `TRAINED`, from what is most like the whole model on."""
    return 0 if trainer.lora is None else 2 if trainer.lora.quantize else 1


def best_of(config: Config, every: Sequence[Layout]) -> tuple[Layout, list[str]]:
    """The fastest, of adapters alone only where nothing else fits, and in 4 bits only where no adapter does; and
    why."""
    most = min(trained(layout.trainer) for layout in every)
    alike = [layout for layout in every if trained(layout.trainer) == most]

    seconds = seconds_of(config)
    best = min(alike, key=seconds)
    return best, _reasons(best, alike, seconds)


def overrides(config: Config, layout: Layout, several: bool = False) -> list[str]:
    """What makes a config this layout, on ``several`` machines of `MACHINE` GPUs or on one."""
    words = [
        f"trainer.{key}={_yaml(value)}"
        for key in SEARCHED
        if (value := getattr(layout.trainer, key)) != getattr(config.trainer, key)
    ]
    if layout.colocated or config.run.colocated:
        words.append(f"run.placement={'colocated' if layout.colocated else 'as_given'}")
    words.append(f"rollout.count={layout.rollouts}")
    if layout.references and layout.references != config.reference.count:
        words.append(f"reference.count={layout.references}")
    if layout.colocated and isinstance(config.rollout.engine, VllmEngineConfig):
        words.append(f"rollout.engine.vllm.gpu_memory_utilization={layout.share:g}")
    elsewhere = _elsewhere(config, layout, several)
    if elsewhere != list(config.run.elsewhere):
        words.append(f"run.elsewhere=[{','.join(elsewhere)}]")
    if layout.tensor_parallel > 1 or isinstance(config.rollout.engine, VllmEngineConfig):
        words.append(f"rollout.engine.vllm.tensor_parallel_size={layout.tensor_parallel}")
    lora = layout.trainer.lora
    if lora and config.trainer.lora is None:
        words.append(f"trainer.lora={{rank: {lora.rank}{', quantize: nf4' if lora.quantize else ''}}}")
    elif lora and lora != config.trainer.lora:
        words.append(f"trainer.lora.quantize={lora.quantize}")
    return words


def _elsewhere(config: Config, layout: Layout, several: bool) -> list[str]:
    """Kinds of actors that join: those of ``config``, and what the first of ``several`` machines has no GPUs for."""
    config, kinds = with_references(config, layout.references), list(config.run.elsewhere)
    if not several:  # nobody is to join what is on one machine
        return [kind for kind in kinds if kind not in PLACED]
    if layout.colocated if "trainer" in kinds else layout.trainer.nodes > 1:  # guests come with it
        more = ["rollout", "trainer"] + guests_beside_rollouts(config) * layout.colocated
        kinds += [kind for kind in more if kind not in kinds]
    shared = sharers(config) if layout.colocated else ()
    for kind in PLACED[1:]:
        here = gpus_but(config, ("trainer", "rollout", *shared, *kinds))
        here += layout.trainer.ranks * ("trainer" not in kinds)
        here += layout.rollouts * layout.tensor_parallel * ("rollout" not in (*shared, *kinds))
        if here > MACHINE and kind not in (*shared, *kinds) and registry.actors(config)[kind].count(config):
            kinds.append(kind)
    return kinds


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _reasons(best: Layout, others: list[Layout], seconds: Callable[[Layout], float]) -> list[str]:
    """Why it is the best of these, which come in the order of their ranks."""
    ranks = best.trainer.ranks
    fewer = [each for each in others if each.trainer.ranks < ranks]
    more = [each for each in others if each.trainer.ranks > ranks]
    said = []
    for word, near in (("fewer", fewer[-1:]), ("more", more[:1])):
        for each in near:
            takes = f"{_longest(each)} takes longest, and a step {seconds(each):.1f} s"
            said.append(f"with {word} ranks ({each.trainer.ranks}), {takes}")
    if best.faster and seconds(replace(best, train_s=best.faster_s)) < seconds(best):
        said.append(
            f"{ranks} rank{'s' * (ranks > 1)} ({_words(best.faster)}) would train in {best.faster_s:.1f} s and not "
            f"{best.train_s:.1f}, but take {best.faster_gib:.0f} GiB each"
        )
    return said


def _longest(layout: Layout) -> str:
    """Who it is that a step waits for most."""
    times = {
        "training": layout.train_s,
        "generating": layout.generate_s,
        "the critic": layout.values_s + layout.critic_s,
        "the reference": layout.reference_s,
    }
    return max(times, key=lambda who: times[who])


def shape_words(trainer: TrainerConfig) -> str:
    """``R2 TP4``: the degrees that are not 1; and whether what is gathered stays (ZeRO-2)."""
    degrees = (
        ("R", trainer.replicas), ("SP", trainer.sequence_parallel), ("TP", trainer.tensor_parallel),
        ("EP", trainer.expert_parallel), ("PP", trainer.pipeline_parallel),
    )  # fmt: skip
    kept = ["Z2"] * (trainer.reshard_after != "layer")
    return " ".join([f"{name}{degree}" for name, degree in degrees if degree > 1] + kept)


def memory_words(trainer: TrainerConfig) -> str:
    """``ckpt host act``: what spares memory."""
    checkpointing = {True: "ckpt", "selective": "part", False: ""}[trainer.gradient_checkpointing]
    offload = {True: "host", "optimizer": "opt", False: ""}[trainer.offload]
    words = (checkpointing, offload, "act" * trainer.offload_activations)
    return " ".join(filter(None, words))


def _words(trainer: TrainerConfig) -> str:
    spares = memory_words(trainer)
    return ", ".join(filter(None, (shape_words(trainer), f"spares: {spares}" if spares else "sparing nothing")))
