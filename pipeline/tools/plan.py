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
from penstock.pipeline.resources.search import BANDWIDTH_SHARE, FLOPS_SHARE, Layout, Load, layouts
from penstock.pipeline.resources.trainer_memory import trainer_parts
from penstock.services.rollout.config import VllmEngineConfig

SHOWN = 6


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
        some = [layout for layout in every if (layout.lora is not None) == lora]
        if some:
            _print_table(console, title, heapq.nsmallest(SHOWN, some, key=lambda each: each.step_s), count, device)
    console.print(
        f"a step of {groups:,} responses of {response:,} tokens; roofline estimates at {FLOPS_SHARE:.0%} of the peak "
        f"FLOPs and {BANDWIDTH_SHARE:.0%} of the bandwidth, for comparing layouts: not measured. Seconds of a step: "
        "the trainer's, the rollouts' (engines x GPUs), of both side by side, and of one after the other "
        "(gate.max_lag=0); GiB of a rank, with gradient checkpointing or without",
        highlight=False,
    )
    best = min(every, key=lambda each: (each.lora is not None, each.step_s))
    console.print(f"take the first: {overrides(config, best)}", highlight=False, soft_wrap=True)


def _print_table(console: Console, title: str, rows: list[Layout], count: int, device: Device) -> None:
    table = Table(title=f"{count} x {device.name}, {title}: the fastest that fit")
    for name in ("ranks", "chkpt", "GiB", "rollouts", "train", "generate", "step", "sync"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.ranks), "yes" if row.checkpointing else "no", f"{row.trainer_gib:.1f}",
            f"{row.rollouts} x {row.tensor_parallel}", f"{row.train_s:.1f}", f"{row.generate_s:.1f}",
            f"{row.step_s:.1f}", f"{row.synchronous_s:.1f}",
        )  # fmt: skip
    console.print(table)


def overrides(config: Config, layout: Layout) -> str:
    """What makes a config this layout."""
    words = [
        f"trainer.ranks={layout.ranks}",
        f"trainer.gradient_checkpointing={str(layout.checkpointing).lower()}",
        f"rollout.count={layout.rollouts}",
    ]
    if layout.tensor_parallel > 1 or isinstance(config.rollout.engine, VllmEngineConfig):
        words.append(f"rollout.engine.vllm.tensor_parallel_size={layout.tensor_parallel}")
    if layout.lora and config.trainer.lora is None:
        words.append(f"'trainer.lora={{rank: {layout.lora.rank}}}'")
    return " ".join(words)
