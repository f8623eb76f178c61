"""`penstock bench memory`: what the code of trainer and reference allocates, beside what the plan says."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from penstock.pipeline.bench.machine import describe
from penstock.pipeline.config import ConfigError, dump, load
from penstock.pipeline.resources.host import host_needs
from penstock.pipeline.resources.model_shape import shape_of
from penstock.pipeline.resources.readers import reference_gib
from penstock.pipeline.resources.trainer_memory import OVERHEAD_GIB, trainer_gib

DEADLINE_S = 600


@dataclass(frozen=True)
class Peak:
    """Of one process, in GiB."""

    process: str
    plan: float
    peak: float
    """What its code allocates, and `OVERHEAD_GIB` for what no tensor holds."""


def bench(console: Console, paths: Sequence[Path]) -> None:
    """Prints a table with a row for each process of each config."""
    table = Table(title="peak GiB of one GPU, and of the trainer's first node of eight")
    for column in ("config", "process", "GiB of a GPU", "allocated", "plan", "plan / allocated", "node GiB"):
        table.add_column(column, justify="left" if column in ("config", "process") else "right")
    for path in track(paths, "counting", console=console, transient=True):
        config = load(path)
        host = host_needs(config)
        for found in compare(path, []):
            of_host = f"{host.trainer_node(config):.0f}" if host and found.process.startswith("trainer") else ""
            row = (f"{found.peak:.1f}", f"{found.plan:.1f}", f"{found.plan / found.peak:.2f}", of_host)
            table.add_row(path.stem, found.process, f"{config.run.gpu_gib or 0:g}", *row)
    console.print(table)
    console.print(f"{OVERHEAD_GIB} GiB of each are the context's and the allocator's; {describe()}", highlight=False)


def compare(path: Path, overrides: Sequence[str]) -> Iterator[Peak]:
    """Plan and peak of the config's trainer, and of its reference where it has one. Raises `ConfigError` where the
    model's sizes are not known."""
    config = load(path, list(overrides))
    shape = shape_of(config)
    if shape is None:
        raise ConfigError(f"{path}: model.path: no config.json on this machine of a decoder that is known")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(dump(config))
        file.flush()
        gib = config.run.gpu_gib
        ranks, stages = config.trainer.ranks, config.trainer.pipeline_parallel
        ends = {0, ranks - ranks // stages}  # a pipeline's first stage has most micro-batches, its last the head
        peak = max(_measure("trainer", file.name, gib, rank) for rank in ends)
        yield Peak(f"trainer, {config.trainer.ranks} ranks", trainer_gib(shape, config.trainer, gib), peak)
        if config.with_reference and (need := reference_gib(config)):
            yield Peak("reference", need, _measure("reference", file.name, gib))


def _measure(process: str, path: str, gpu_gib: float | None, rank: int = 0) -> float:
    program = [sys.executable, "-m", "penstock.pipeline.bench.fake_memory"]
    command = [*program, process, path, str(gpu_gib or 0), str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        raise RuntimeError(f"counting the {process}'s memory failed:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])) + OVERHEAD_GIB
