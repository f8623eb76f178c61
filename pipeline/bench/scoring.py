"""`penstock bench scoring`: a reward that waits, by how old experience may be, beside TRL with the same function."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from penstock.pipeline.bench.machine import describe
from penstock.pipeline.bench.peers import TRL, need_trl, run_trl
from penstock.pipeline.config import ConfigError
from penstock.pipeline.run.command import penstock
from penstock.pipeline.run.summary import steps_of
from penstock.protocols.experience import Group, Prompt, Trajectory
from penstock.services.reward.config import FunctionConfig, RewardConfig
from penstock.services.reward.service import Reward
from penstock.services.runtime.lines import read_lines
from penstock.services.runtime.scorer import ScoringTask

JUDGE = "penstock.pipeline.bench.judge:judge"
FUNCTIONS = (
    f"[{{function: '{JUDGE}', timeout_s: 30, options: {{mean_s: MEAN, most_s: MOST}}}}, "
    "{function: exact_match, name: fast, weight: 0}]"
)
N = 8


@dataclass(frozen=True)
class Row:
    """One run."""

    name: str
    seconds: list[float]
    """Since training began, at the end of each step."""
    settling: int
    """Steps at the start that do not count: the pipeline fills."""
    judge_s: float = float("nan")
    fast_s: float = float("nan")
    most_in_flight: int = 0
    lag: float = 0.0
    reward: float = float("nan")

    @property
    def per_step(self) -> float:
        """Seconds a step, once the pipeline is full."""
        return (self.seconds[-1] - self.seconds[self.settling - 1]) / (len(self.seconds) - self.settling)


def bench(
    console: Console, config: Path, folder: Path, lags: list[str], steps: int, mean_s: float, parts: list[str]
) -> None:
    """Runs them in turn and prints a table. ``lags``: η, or η/W with a window."""
    if folder.exists():
        raise ConfigError(f"--folder: {folder} exists; choose another folder")
    functions = FUNCTIONS.replace("MEAN", f"{mean_s:g}").replace("MOST", f"{8 * mean_s:g}")
    rows: list[Row] = []
    if "runs" in parts or "trl" in parts:
        console.print("making the tiny model …")
        subprocess.run(penstock("prepare", str(config), "--folder", str(folder / "model-run")), check=True)
    model = folder / "model-run" / "model"
    if "runs" in parts:
        rows += [_run(console, config, folder, model, lag, steps, functions) for lag in lags]
    if "trl" in parts:
        need_trl(console)
        console.print("trl …")
        (folder / "trl").mkdir(parents=True)
        course = run_trl(config, folder / "model-run", folder / "trl", max(8, steps // 2), 0, 2, JUDGE, mean_s)
        rows.append(Row("TRL GRPOTrainer", course.seconds, 2))
    if rows:
        _print_runs(console, rows, mean_s)
    if "calls" in parts:
        _bench_calls(console, mean_s)
    console.print(describe(), highlight=False)


def _run(console: Console, config: Path, folder: Path, model: Path, lag: str, steps: int, functions: str) -> Row:
    eta, _, window = lag.partition("/")
    name = f"η = {eta}" + (f", window {window}" if window else "")
    console.print(f"{name} …")
    count = steps * (1 + int(eta))
    overrides = [
        f"run.folder={folder}", f"run.name=lag-{eta}-{window or 1}", f"trainer.steps={count}", "prompts.eval=null",
        f"model={{type: pretrained, path: {model}, dtype: float32}}", f"gate.max_lag={eta}", "gate.prefetch=null",
        f"gate.window={window or 1}", f"reward.functions={functions}", "trainer.checkpoint.every=1000000",
    ]  # fmt: skip
    subprocess.run(penstock("run", str(config), *overrides), check=True, stdout=subprocess.DEVNULL)
    run = folder / f"lag-{eta}-{window or 1}"
    rows = steps_of(run)
    settling = max(1, min(len(rows) // 3, 2 * (1 + int(eta))))
    settled = rows[settling:]

    def mean(key: str) -> float:
        found = [row[key] for row in settled if key in row]
        return statistics.mean(found) if found else float("nan")

    gauges = [
        member.get("calls_in_flight", 0)
        for line in read_lines(run / "actors.jsonl")
        for member in line["actors"].values()
    ]
    return Row(
        name, [row["train_s"] for row in rows], settling, mean("latency/reward/judge"), mean("latency/reward/fast"),
        int(max(gauges, default=0)), mean("lag_mean"), statistics.mean(row["reward"] for row in rows[-10:]),
    )  # fmt: skip


def _print_runs(console: Console, rows: list[Row], mean_s: float) -> None:
    base = next((row for row in rows if row.name == "η = 0"), rows[0])
    table = Table(title=f"steps with a judge that takes {mean_s:g} s on average, at most {8 * mean_s:g} s")
    for column in ("", "s/step", "steps/s", f"x {base.name}", "mean lag", "judge", "fast reward", "calls in flight"):
        table.add_column(column)
    for row in rows:
        ours = row.judge_s == row.judge_s
        table.add_row(
            row.name, f"{row.per_step:.2f}", f"{1 / row.per_step:.2f}", f"{base.per_step / row.per_step:.2f}",
            f"{row.lag:.2f}" if ours else "-", f"{row.judge_s:.2f} s" if ours else "-",
            f"{row.fast_s * 1000:.0f} ms" if ours else "-", str(row.most_in_flight) if ours else "-",
        )  # fmt: skip
    console.print(table)
    console.print(
        "judge, fast reward: from when the reward process had a group to its column, the slowest of 8 calls, on "
        f"average; {TRL}",
        highlight=False,
    )


def _bench_calls(console: Console, mean_s: float, calls: int = 20_000) -> None:
    """Calls alone, as fast as the reward process takes them: how many are under way, and what memory they leave."""
    options = {"mean_s": mean_s, "most_s": 8 * mean_s}
    functions = [FunctionConfig(function=JUDGE, timeout_s=30, options=options)]
    reward = Reward(RewardConfig(functions=functions), workers=1, group_size=N)
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    most = begun = 0
    finished, memory = [0], [0.0, 0.0]
    done = threading.Condition()

    def answer(_task: ScoringTask, _column: str, _values: np.ndarray, _errors: object = ()) -> None:
        with done:
            finished[0] += N
            done.notify()

    started = time.monotonic()
    while finished[0] < calls:
        with done:
            done.wait(0.05)
        while begun < calls and reward.room(0) > 0:
            reward.score([_task(begun)], answer)
            begun += N
        most = max(most, int(reward.gauges()["calls_in_flight"]))
        if finished[0] >= calls // 4 and not memory[0]:
            memory[0] = _memory(processes)
    memory[1] = _memory(processes)
    seconds = time.monotonic() - started
    reward.close()
    console.print(
        f"{calls:,} calls in {seconds:.0f} s: {calls / seconds:,.0f} calls/s, at most {most} in flight; memory of the "
        f"reward and its worker after a quarter {memory[0]:.1f} MiB, at the end {memory[1]:.1f} MiB",
        highlight=False,
    )


def _task(number: int) -> ScoringTask:
    some = np.zeros(2, np.int32)
    one = Trajectory(some, np.array([0, 1], np.uint8), some.astype(np.float32), np.array([-1, 0], np.int32), "ab")
    group = Group(number, Prompt(index=number, text="sort ba=", truth="ab"), [one] * N)
    return ScoringTask(("train", number), group, ("reward/judge",), {}, 0)


def _memory(processes: list[psutil.Process]) -> float:
    return sum(process.memory_info().rss for process in processes if process.is_running()) / 2**20
