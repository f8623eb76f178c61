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

END_S = 60.0
"""Seconds in which a run that is not watched any more has to end."""

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
    try:
        samples = _watch(process, folder / "run", every)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
    if process.returncode:
        raise ConfigError(f"the run ended with exit code {process.returncode}; see {folder / 'run' / 'logs'}")
    _save(folder, samples)
    return _print(console, samples, steps)


def _watch(process: subprocess.Popen[bytes], run: Path, every: int) -> list[Sample]:
    """One for each ``every`` steps of the run, until its ``process`` has ended."""
    samples: list[Sample] = []
    metrics = run / "metrics.jsonl"
    seen = 0
    while process.poll() is None:
        time.sleep(0.5)
        if metrics.is_file():
            with metrics.open() as file:
                seen = sum(1 for _ in file)
        if seen >= (samples[-1][0] + every if samples else every):
            samples.append((seen, _memory(run)))
    return samples


def _memory(run: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for process in psutil.process_iter(["cmdline", "cwd", "memory_info"]):
        line = process.info["cmdline"] or []
        if "serve" in line and str(run) in line:
            found[line[line.index("--name") + 1]] = process.info["memory_info"].rss / 2**20
        if process.info["cwd"] == str(run.resolve() / "redis"):
            # Of a run in a deep folder the socket is elsewhere: the server's title says where.
            found |= _of_redis(" ".join(line).partition("unixsocket:")[2].strip())
    return found


def _of_redis(socket: str) -> dict[str, float]:
    """MiB by its own count; none where it has just ended."""
    client = redis.Redis(unix_socket_path=socket)
    try:
        return {"redis": client.info("memory")["used_memory"] / 2**20}
    except redis.RedisError:
        return {}
    finally:
        client.close()


def _growth(points: list[tuple[int, float]]) -> tuple[float, float]:
    """MiB at the end and relative growth per 1,000 steps, of the ``points`` after the first fifth, by the slope between
    the medians of the second and of the last fifth."""
    fifth = max(1, len(points) // 4)
    first, last = points[:fifth], points[-fifth:]
    start, end = (statistics.median(value for _, value in part) for part in (first, last))
    apart = statistics.median(s for s, _ in last) - statistics.median(s for s, _ in first)
    return end, (end - start) / start / max(1, apart) * 1000


def _print(console: Console, samples: list[Sample], steps: int) -> bool:
    """Raises `ConfigError` where there is nothing to tell growth by."""
    settled: dict[str, list[tuple[int, float]]] = {}
    for step, memory in samples:
        for name in memory if step >= steps * 0.2 else ():
            settled.setdefault(name, []).append((step, memory[name]))
    settled = {name: points for name, points in sorted(settled.items()) if len(points) > 1}
    if not settled:
        raise ConfigError("--steps: fewer than two looks at the memory after the first fifth; more, or a lower --every")
    table = Table("process", "MiB at the end", "growth per 1,000 steps", title=f"{steps} steps")
    worst = 0.0
    for name, points in settled.items():
        size, growth = _growth(points)
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
