"""`penstock plan`: what a run takes on GPUs that nobody has rented yet."""

from __future__ import annotations

import heapq

from rich.console import Console
from rich.table import Table

from penstock.pipeline.config import Config, ConfigError
from penstock.pipeline.resources.devices import Device, devices_of
from penstock.pipeline.resources.host import host_needs
from penstock.pipeline.resources.memory import plan
from penstock.pipeline.resources.model_shape import Shape, shape_of
from penstock.pipeline.resources.search import BANDWIDTH_SHARE, Layout, layouts
from penstock.pipeline.resources.step_time import FLOPS_SHARE, LINK_SHARE, Load
from penstock.pipeline.resources.trainer_memory import trainer_parts
from penstock.services.rollout.config import VllmEngineConfig
from penstock.services.trainer.config import TrainerConfig

SHOWN = 6
SEARCHED = (
    "ranks", "nodes", "replicas", "sequence_parallel", "tensor_parallel", "expert_parallel", "gradient_checkpointing",
    "offload", "offload_activations",
)  # fmt: skip
"""Keys of `trainer` that the search chooses."""


def show(console: Console, config: Config, gpus: str | None, length: int | None) -> bool:
    """Prints what each process holds, and, for ``gpus`` like 8xH100, layouts that fit; ``length`` is a response's, on
    average. Returns whether the config as it is fits. Raises `ConfigError` where the model's sizes are not known."""
    shape = shape_of(config)
    if shape is None:
        raise ConfigError("model.path: no config.json of a dense decoder at hand; give a folder that has one")
    count, device = devices_of(gpus) if gpus else (0, None)
    if device:
        config = config.model_copy(update={"run": config.run.model_copy(update={"gpu_gib": device.gib})})
    found = plan(config)
    for line in found.lines:
        console.print(line, highlight=False)
    _print_parts(console, config, shape)
    for problem in found.problems:
        console.print(f"does not fit: {problem}", style="red", highlight=False)
    if needs := host_needs(config):
        console.print(
            f"host: {needs.trainer_node(config):.0f} GiB on the trainer's first node, {needs.shared:.0f} GiB of it "
            f"shared memory; {needs.checkpoints:.0f} GiB of disk for checkpoints",
            highlight=False,
        )
    if device:
        response = length or max(1, config.rollout.sampling.max_new_tokens // 2)
        _print_layouts(console, config, shape, count, device, response)
    return not found.problems


def _print_parts(console: Console, config: Config, shape: Shape) -> None:
    parts = trainer_parts(shape, config.trainer, config.run.gpu_gib)
    table = Table(title=f"a trainer's rank of {config.trainer.ranks}")
    table.add_column("at its peak")
    table.add_column("GiB", justify="right")
    for name, size in parts.items():
        table.add_row(name, f"{size:.1f}")
    table.add_section()
    table.add_row("together", f"{sum(parts.values()):.1f}")
    console.print(table)


def _print_layouts(console: Console, config: Config, shape: Shape, count: int, device: Device, response: int) -> None:
    groups = config.gate.groups_per_step * config.sampling.trajectories
    load = Load(float(groups * response), float(response))
    every = list(layouts(config, shape, count, device, load))
    if not every:
        console.print(
            f"nothing fits {count} x {device.name} of {device.gib:g} GiB: take more of them, or larger ones; fewer "
            "trainer.tokens_per_micro_batch or a shorter rollout.engine.max_length need less",
            style="red", highlight=False,
        )  # fmt: skip
        return
    for title, lora in (("training all weights", False), ("training an adapter (LoRA)", True)):
        some = [layout for layout in every if (layout.trainer.lora is not None) == lora]
        if some:
            _print_table(console, title, heapq.nsmallest(SHOWN, some, key=lambda each: each.step_s), count, device)
    console.print(
        f"a step of {groups:,} responses of {response:,} tokens; roofline estimates at {FLOPS_SHARE:.0%} of the peak "
        f"FLOPs, {BANDWIDTH_SHARE:.0%} of the memory's bandwidth and {LINK_SHARE:.0%} of what connects GPUs, for "
        "comparing layouts: not measured. Shape: replicas (R), sequence (SP), tensor (TP) and expert parallelism (EP). "
        "Spares: memory, by computing again all or part of what a layer gave (gradient_checkpointing), and by keeping "
        "weights (off) or activations (act) on the host (offload, offload_activations). GiB of a rank. Seconds of a "
        "step: the trainer's, the rollouts' (engines x GPUs), of both side by side, and of one after the other "
        "(gate.max_lag=0)",
        highlight=False,
    )
    adapter = all(layout.trainer.lora for layout in every)
    alike = [layout for layout in every if bool(layout.trainer.lora) == adapter]
    best = min(alike, key=lambda each: each.step_s)
    for reason in reasons(best, alike):
        console.print(f"why: {reason}", highlight=False, markup=False)
    console.print(f"take the first: {overrides(config, best)}", highlight=False, markup=False, soft_wrap=True)


def reasons(best: Layout, others: list[Layout]) -> list[str]:
    """Why it is the best of these, which come in the order of their ranks."""
    ranks = best.trainer.ranks
    fewer = [each for each in others if each.trainer.ranks < ranks]
    more = [each for each in others if each.trainer.ranks > ranks]
    said = []
    for word, near in (("fewer", fewer[-1:]), ("more", more[:1])):
        for each in near:
            longer = "training" if each.train_s > each.generate_s else "generating"
            said.append(f"with {word} ranks ({each.trainer.ranks}), {longer} takes longest: {each.step_s:.1f} s")
    if best.faster and best.faster_s < best.train_s:
        said.append(
            f"{ranks} ranks ({_words(best.faster)}) would train in {best.faster_s:.1f} s and not "
            f"{best.train_s:.1f}, but take {best.faster_gib:.0f} GiB each"
        )
    return said


def _shape_words(trainer: TrainerConfig) -> str:
    degrees = (
        ("R", trainer.replicas), ("SP", trainer.sequence_parallel), ("TP", trainer.tensor_parallel),
        ("EP", trainer.expert_parallel),
    )  # fmt: skip
    return " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1)


def _memory_words(trainer: TrainerConfig) -> str:
    checkpointing = {True: "all", "selective": "part", False: ""}[trainer.gradient_checkpointing]
    words = (checkpointing, "off" * trainer.offload, "act" * trainer.offload_activations)
    return " ".join(filter(None, words))


def _words(trainer: TrainerConfig) -> str:
    spares = _memory_words(trainer)
    return ", ".join(filter(None, (_shape_words(trainer), f"spares: {spares}" if spares else "sparing nothing")))


def _print_table(console: Console, title: str, rows: list[Layout], count: int, device: Device) -> None:
    table = Table(title=f"{count} x {device.name}, {title}: the fastest that fit")
    for name in ("ranks", "shape", "spares", "GiB", "rollouts", "train", "gen", "step", "sync"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.trainer.ranks), _shape_words(row.trainer), _memory_words(row.trainer), f"{row.trainer_gib:.1f}",
            f"{row.rollouts} x {row.tensor_parallel}", f"{row.train_s:.1f}", f"{row.generate_s:.1f}",
            f"{row.step_s:.1f}", f"{row.synchronous_s:.1f}",
        )  # fmt: skip
    console.print(table)


def overrides(config: Config, layout: Layout) -> str:
    """What makes a config this layout."""
    words = [
        f"trainer.{key}={_yaml(value)}"
        for key in SEARCHED
        if (value := getattr(layout.trainer, key)) != getattr(config.trainer, key)
    ]
    words.append(f"rollout.count={layout.rollouts}")
    if layout.trainer.nodes > 1 and "trainer" not in config.run.elsewhere:
        words.append("'run.elsewhere=[rollout,trainer]'")
    if layout.tensor_parallel > 1 or isinstance(config.rollout.engine, VllmEngineConfig):
        words.append(f"rollout.engine.vllm.tensor_parallel_size={layout.tensor_parallel}")
    if layout.trainer.lora and config.trainer.lora is None:
        words.append(f"'trainer.lora={{rank: {layout.trainer.lora.rank}}}'")
    return " ".join(words)


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
