"""`penstock bench memory --grid`: the plan of a trainer's rank beside what the code allocates, on many ranks and with
each means to spare memory."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from rich.console import Console
from rich.progress import track
from rich.table import Table

from penstock.pipeline.bench.machine import describe
from penstock.pipeline.bench.memory import Peak, compare
from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.resources.model_files import read_config

RANKS = (8, 64, 512)
MEANS = {
    "checkpointing": ["gradient_checkpointing=true"],
    "selective": ["gradient_checkpointing=selective"],
    "none": ["gradient_checkpointing=false"],
    "activations on the host": ["gradient_checkpointing=true", "offload_activations=true"],
    "moments on the host": ["gradient_checkpointing=true", "offload=optimizer"],
    "LoRA of rank 32": ["gradient_checkpointing=true", "lora.rank=32"],
}
"""Overrides of the section `trainer`."""


def bench(console: Console, paths: Sequence[Path], layers: int | None) -> None:
    """Prints a row for each config and each of `MEANS`, a column for each of `RANKS`; of models with no more than
    ``layers``, where that is given: each layer is as the other."""
    table = Table(title="GiB of a trainer's rank: allocated (plan / allocated)")
    table.add_column("config")
    table.add_column("with")
    for ranks in RANKS:
        table.add_column(f"{ranks} ranks", justify="right")
    cases = list(product(paths, MEANS, RANKS))
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        work = pool.map(lambda case: _measure(case[0], case[1], case[2], layers, Path(folder)), cases)
        found = list(track(work, "counting", total=len(cases), console=console, transient=True))
    errors = [one for one in found if isinstance(one, str)]
    for place in range(0, len(cases), len(RANKS)):
        path, means, _ = cases[place]
        table.add_row(path.stem, means, *(_words(one) for one in found[place : place + len(RANKS)]))
    console.print(table)
    for error in errors:
        console.print(error, highlight=False, markup=False)
    off = [one.plan / one.peak for one in found if isinstance(one, Peak)] or [math.nan]
    console.print(
        f"the plan is {min(off):.2f} to {max(off):.2f} times what is allocated; micro-batches of 4,096 tokens"
        f"{f', models cut to {layers} layers' if layers else ''}; {describe()}",
        highlight=False,
    )


def _words(found: Peak | str) -> str:
    return "–" if isinstance(found, str) else f"{found.peak:.1f} ({found.plan / found.peak:.2f})"


def _measure(path: Path, means: str, ranks: int, layers: int | None, folder: Path) -> Peak | str:
    """The peak, or what has gone wrong."""
    overrides = [f"trainer.ranks={ranks}", "trainer.nodes=1", "trainer.tokens_per_micro_batch=4096"]
    overrides += [f"trainer.{each}" for each in MEANS[means]]
    if layers:
        about = read_config(load(path))
        if about is None:
            raise ConfigError(f"{path}: model.path: no config.json of it on this machine")
        model = Path(mkdtemp(dir=folder))
        cut = min(layers, about["num_hidden_layers"])
        (model / "config.json").write_text(json.dumps(about | {"num_hidden_layers": cut}))
        overrides.append(f"model.path={model}")
    try:
        return next(compare(path, overrides))
    except (ConfigError, RuntimeError, subprocess.TimeoutExpired) as error:
        return f"{path.stem}, {means}, {ranks} ranks: {error}"
