"""`penstock plan`: what a run takes on GPUs that nobody has rented yet."""

from __future__ import annotations

import heapq
import shlex

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from penstock.pipeline.config import Config, ConfigError, TinyModel
from penstock.pipeline.resources.choice import (
    TRAINED,
    best_of,
    memory_words,
    nothing_fits,
    overrides,
    shape_words,
    trained,
)
from penstock.pipeline.resources.devices import devices_of
from penstock.pipeline.resources.gpus import gpus_of_programs, total_gpus
from penstock.pipeline.resources.host import PROCESS_GIB, HostNeeds, host_needs, on_trainer_nodes, processes_of
from penstock.pipeline.resources.layout import Layout, seconds_of
from penstock.pipeline.resources.loads import half_of_the_longest, load_of
from penstock.pipeline.resources.memory import plan, staged, trainer_of
from penstock.pipeline.resources.model_shape import shape_of
from penstock.pipeline.resources.placement import place
from penstock.pipeline.resources.readers import uncounted
from penstock.pipeline.resources.search import BANDWIDTH_SHARE, layouts, with_references
from penstock.pipeline.resources.shares import too_much
from penstock.pipeline.resources.step_time import FLOPS_SHARE, LINK_SHARE, PROMPT, Load
from penstock.pipeline.resources.store_size import store_gib
from penstock.pipeline.resources.trainer_memory import trainer_parts
from penstock.services.modeling.decoder_shape import Shape
from penstock.services.runtime import registry
from penstock.services.runtime.gpu_kinds import MACHINE, Device

SHOWN = 6


def show(console: Console, config: Config, gpus: str | None, length: int | None, prompt: int = PROMPT) -> bool:
    """Prints what each process holds, and, for ``gpus`` like 8xH100, layouts that fit; ``length`` is a response's, on
    average, and ``prompt`` a prompt's. Returns whether the config as it is fits. Raises `ConfigError` where the model's
    sizes are not known."""
    shape = shape_of(config)
    if isinstance(config.model, TinyModel):
        raise ConfigError(
            "model.type: a tiny model needs no plan; give a config with model: {type: pretrained, path: …}"
        )
    if shape is None:
        raise ConfigError(
            "model.path: no config.json at hand of a model that is counted: a decoder of attention and matrices, or a "
            "mixture of experts like Qwen3-MoE; give a folder that has one. A run goes without a plan, too"
        )
    count, device = devices_of(gpus) if gpus else (0, None)
    if device:
        config = config.model_copy(update={"run": config.run.model_copy(update={"gpu_gib": device.gib})})
    found = plan(config)
    found.problems += _too_few(config, count, device) if device else []
    for line in found.lines:
        console.print(line, highlight=False, markup=False)
    _print_parts(console, config, shape)
    for problem in found.problems:
        console.print(f"does not fit: {problem}", style="red", highlight=False, markup=False)
    if needs := host_needs(config):
        console.print(
            f"host: {_nodes_words(needs, config)}; {needs.checkpoints:.0f} GiB of disk for checkpoints; up to "
            f"{store_gib(config):.1f} GiB in Redis, and twice that on its disk, until a checkpoint covers it "
            "(trainer.checkpoint.every)",
            highlight=False,
        )
    if device:
        load = load_of(config, length or half_of_the_longest(config), prompt)
        _print_layouts(console, config, shape, count, device, load)
    return not found.problems


def _too_few(config: Config, count: int, device: Device) -> list[str]:
    """Why ``count`` GPUs are too few for ``config`` as it is, whatever machines they are in."""
    if config.run.placement == "auto" or total_gpus(config) <= count:  # which takes a layout of its own
        return []
    here = config.model_copy(update={"run": config.run.model_copy(update={"elsewhere": ()})})
    left = count - (taken := gpus_of_programs(config))
    if left < 1:
        return [f"programs: they want {taken} GPUs of their own, and there are {count}"]
    gpus = [str(number) for number in range(left)]
    try:
        return too_much(here, place(here, gpus), dict.fromkeys(gpus, device.gib))
    except ConfigError as error:
        return [str(error)]


def _print_parts(console: Console, config: Config, shape: Shape) -> None:
    parts = trainer_parts(shape, trainer_of(config), config.run.gpu_gib, staged(config))
    table = Table(title=f"a trainer's rank of {config.trainer.ranks}")
    table.add_column("at its peak")
    table.add_column("GiB", justify="right")
    for name, size in parts.items():
        table.add_row(name, f"{size:.1f}")
    table.add_section()
    table.add_row("together", f"{sum(parts.values()):.1f}")
    console.print(table)


def _print_layouts(console: Console, config: Config, shape: Shape, count: int, device: Device, load: Load) -> None:
    groups = config.gate.groups_per_step * config.sampling.trajectories
    count = max(0, count - gpus_of_programs(config))
    every = list(layouts(config, shape, count, device, load))
    if not every:
        console.print(nothing_fits(config, count, device), style="red", highlight=False)
        return
    by_kind: dict[int, list[Layout]] = {}
    for layout in every:
        by_kind.setdefault(trained(layout.trainer), []).append(layout)
    shown = {kind: heapq.nsmallest(SHOWN, by_kind[kind], key=seconds_of(config)) for kind in sorted(by_kind)}
    for kind, rows in shown.items():
        _print_table(console, TRAINED[kind], rows, count, device)
    console.print(
        f"a step of {groups:,} responses of {load.length - load.prompt:,.0f} tokens to prompts of {load.prompt:,.0f}; "
        f"roofline estimates at {FLOPS_SHARE:.0%} of the peak FLOPs, {BANDWIDTH_SHARE:.0%} of the memory's bandwidth "
        f"and {LINK_SHARE:.0%} of what connects GPUs, for comparing layouts: not measured. "
        "Shape: replicas (R), sequence (SP), tensor (TP), expert (EP) "
        "and pipeline parallelism (PP); what is gathered of the model stays for an update (Z2: reshard_after=update). "
        "Spares: memory, by computing again what a layer gave (ckpt: gradient_checkpointing=true) or part of it (part: "
        "selective), and by keeping the optimizer's means (opt: offload=optimizer), weights too (host: offload=true), "
        "or activations (act: offload_activations) on the host. GiB of a rank. Rollouts: "
        "engines x GPUs; *: on the trainer's own (run.placement=colocated). Refs: reference.count. Seconds of a step: "
        "the trainer's, the rollouts', of all side by side (*: in turn), and of one after the other (gate.max_lag=0); "
        "a critic's and the references' are in the last two",
        highlight=False,
    )
    best, why = best_of(config, every)
    for kind, (other, *_) in shown.items():
        if kind != trained(best.trainer):
            taken = shlex.join(overrides(config, other, count > MACHINE))
            said = f"or, {TRAINED[kind]}, {_host(config, other)}: {taken}"
            console.print(said, highlight=False, markup=False, soft_wrap=True)
    if left_out := uncounted(config):
        console.print(f"in all of these: {left_out}", highlight=False, markup=False)
    for reason in why:
        console.print(f"why: {reason}", highlight=False, markup=False)
    console.print(f"the first takes {_host(config, best)}", highlight=False, markup=False)
    taken = shlex.join(overrides(config, best, count > MACHINE))
    console.print(f"take the first: {taken}", highlight=False, markup=False, soft_wrap=True)


def _host(config: Config, layout: Layout) -> str:
    placement = "colocated" if layout.colocated else "as_given"
    changed = {
        "trainer": layout.trainer,
        "run": config.run.model_copy(update={"placement": placement}),
        "rollout": config.rollout.model_copy(update={"count": layout.rollouts}),
    }
    needs = host_needs(made := with_references(config, layout.references).model_copy(update=changed))
    return f"{max(_nodes_gib(needs, made)):.0f} GiB of a host of the trainer's" if needs else "a host of unknown size"


def _nodes_words(needs: HostNeeds, config: Config) -> str:
    first, other = _nodes_gib(needs, config)
    more = f", {other:.0f} GiB on each other, whose rollouts receive versions" * (config.run.colocated and other > 0)
    return f"{first:.0f} GiB on the trainer's first node, {needs.shared:.0f} GiB of it shared memory{more}"


def _nodes_gib(needs: HostNeeds, config: Config) -> tuple[float, float]:
    """Of the trainer's first node, and of each other; 0: there is none."""
    trainer, specs = config.trainer, registry.actors(config)
    ranks = trainer.ranks // trainer.nodes if trainer.nodes > 1 else min(MACHINE, trainer.ranks)
    guests = on_trainer_nodes(config, -(-trainer.ranks // ranks))
    processes = ranks + sum(count * processes_of(specs[kind], config) for kind, count in guests.items())
    first, other = needs.trainer_nodes(config, guests, ranks)
    return first + PROCESS_GIB * processes, other + PROCESS_GIB * processes * (other > 0)


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _print_table(console: Console, title: str, rows: list[Layout], count: int, device: Device) -> None:
    table = Table(title=f"{count} x {device.name}, {title}: the fastest that fit", box=SIMPLE_HEAD, pad_edge=False)
    referred = any(row.references for row in rows)
    for name in ("ranks", "shape", "spares", "GiB", "rollouts", *["refs"] * referred, "train", "gen", "step", "sync"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        engines = f"{row.rollouts} x {row.tensor_parallel}{' *' * row.colocated}"
        table.add_row(
            str(row.trainer.ranks), shape_words(row.trainer), memory_words(row.trainer), f"{row.trainer_gib:.1f}",
            engines, *[str(row.references)] * referred,
            *map(_seconds, (row.train_s, row.generate_s, row.step_s, row.synchronous_s)),
        )  # fmt: skip
    console.print(table)
