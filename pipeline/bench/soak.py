"""`penstock bench soak`: thousands of tiny steps, and what they leave in memory."""

from __future__ import annotations

import csv
import statistics
import subprocess
import time
from pathlib import Path

import psutil
import redis
from rich.console import Console
from rich.table import Table

from penstock.pipeline.bench.machine import describe
from penstock.pipeline.config import ConfigError
from penstock.pipeline.run.command import penstock

TINY = [
    "gate.groups_per_step=4", "gate.prefetch=4", "rollout.sampling.n=2", "rollout.sampling.max_new_tokens=4",
    "rollout.engine.max_sequences=16", "model.warm_start.steps=0", "model.hidden_size=32", "model.intermediate_size=32",
    "model.head_dim=8", "prompts.eval=null", "trainer.checkpoint.every=50", "replay.archive=none",
]  # fmt: skip

Sample = tuple[int, dict[str, float]]
"""Step, and MiB of each process and of Redis's own count."""


def bench(console: Console, config: Path, folder: Path, steps: int, every: int) -> bool:
    """Runs ``steps`` tiny steps, samples memory every so many, prints growth per 1,000 steps after the first fifth;
    returns whether all of it is below 1 %. Leaves soak.csv and soak.svg in ``folder``."""
    if folder.exists():
        raise ConfigError(f"--folder: {folder} exists; choose another folder")
    overrides = [f"run.folder={folder}", "run.name=run", f"trainer.steps={steps}", *TINY]
    command = penstock("run", str(config), *overrides)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    samples: list[Sample] = []
    metrics = folder / "run" / "metrics.jsonl"
    seen = 0
    while process.poll() is None:
        time.sleep(0.5)
        if metrics.is_file():
            with metrics.open() as file:
                seen = sum(1 for _ in file)
        if seen >= (samples[-1][0] + every if samples else every):
            samples.append((seen, _memory(folder / "run")))
    if process.returncode:
        raise ConfigError(f"the run ended with exit code {process.returncode}; see {folder / 'run' / 'logs'}")
    _save(folder, samples)
    return _print(console, samples, steps)


def _memory(run: Path) -> dict[str, float]:
    found = {}
    for process in psutil.process_iter(["cmdline", "memory_info"]):
        line = process.info["cmdline"] or []
        if "serve" in line and str(run) in line:
            found[line[line.index("--name") + 1]] = process.info["memory_info"].rss / 2**20
    client = redis.Redis.from_url(f"unix://{(run / 'redis' / 'redis.sock').resolve()}")
    found["redis"] = client.info("memory")["used_memory"] / 2**20
    client.close()
    return found


def _growth(samples: list[Sample], name: str, steps: int) -> tuple[float, float]:
    """MiB at the end and relative growth per 1,000 steps after the first fifth, by the slope between the medians of
    the second and of the last fifth."""
    points = [(step, memory[name]) for step, memory in samples if name in memory and step >= steps * 0.2]
    fifth = max(1, len(points) // 4)
    first, last = points[:fifth], points[-fifth:]
    start, end = (statistics.median(value for _, value in part) for part in (first, last))
    apart = statistics.median(s for s, _ in last) - statistics.median(s for s, _ in first)
    return end, (end - start) / start / max(1, apart) * 1000


def _print(console: Console, samples: list[Sample], steps: int) -> bool:
    names = sorted({name for _, memory in samples for name in memory})
    table = Table("process", "MiB at the end", "growth per 1,000 steps", title=f"{steps} steps")
    worst = 0.0
    for name in names:
        size, growth = _growth(samples, name, steps)
        worst = max(worst, growth)
        table.add_row(name, f"{size:.1f}", f"{growth * 100:+.2f} %")
    console.print(table)
    console.print(describe(), highlight=False)
    return worst < 0.01


def _save(folder: Path, samples: list[Sample]) -> None:
    from matplotlib.figure import Figure

    names = sorted({name for _, memory in samples for name in memory})
    with (folder / "soak.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *names])
        writer.writerows([step, *(round(memory.get(name, 0), 3) for name in names)] for step, memory in samples)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for name in names:
        axes.plot([s for s, m in samples if name in m], [m[name] for _, m in samples if name in m], label=name, lw=1)
    axes.set(xlabel="step", ylabel="MiB", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, ncols=4)
    figure.savefig(folder / "soak.svg")
