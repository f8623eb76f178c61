"""`penstock bench gateway`: what the gateway adds to a turn under load, and what asynchrony gains where tools wait."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.pipeline.bench.machine import describe
from penstock.pipeline.bench.peers import TRL, need_trl, run_trl
from penstock.pipeline.config import ConfigError
from penstock.pipeline.run.command import penstock
from penstock.pipeline.run.summary import steps_of

N = 8
"""Sessions of a group."""
GROUPS = 4
"""Groups of a step, in the runs with tools that wait."""
JOIN_S = 120
TOOLS = "penstock.pipeline.bench.waiting_agents"


@dataclass(frozen=True)
class Load:
    """One run under load."""

    turns: np.ndarray
    """float64 ``[turns, 2]``: seconds from the question to the answer, and of these in the engine."""
    finished: int
    summary: dict[str, Any]
    seconds: float


@dataclass(frozen=True)
class Row:
    """One run with tools that wait."""

    name: str
    per_step: float
    """Seconds, once the pipeline is full."""
    lag: float = float("nan")


def bench(
    console: Console,
    config: Path,
    folder: Path,
    sessions: int,
    think_s: float,
    lags: list[int],
    steps: int,
    tool_s: float,
    parts: list[str],
) -> None:
    """Runs the ``parts`` in turn and prints a table of each."""
    if folder.exists():
        raise ConfigError(f"--folder: {folder} exists; choose another folder")
    console.print("making the tiny model …")
    subprocess.run(penstock("prepare", str(config), "--folder", str(folder / "model-run")), check=True)
    if "load" in parts:
        _print_load(console, _load(console, config, folder, sessions, think_s, steps), sessions, think_s)
    rows = [_tools(console, config, folder, lag, steps, tool_s) for lag in lags] if "tools" in parts else []
    if "trl" in parts:
        rows.append(_trl(console, config, folder, steps, tool_s))
    if rows:
        _print_tools(console, rows, tool_s)
    console.print(describe(), highlight=False)


def _played(config: Path, folder: Path, name: str, agents: list[Any], overrides: list[str]) -> dict[str, Any]:
    """A whole run, with agents; what these have seen."""
    model = folder / "model-run" / "model"
    every = [
        f"run.folder={folder}", f"run.name={name}", "prompts.eval=null", "gate.prefetch=null",
        f"model={{type: pretrained, path: {model}, dtype: float32}}", "gateway.tool_calls=none",
        "gateway.http=127.0.0.1:0", "gateway.bind=tcp://127.0.0.1:0", "trainer.checkpoint.every=1000000",
        f"rollout.sampling.n={N}",
    ]  # fmt: skip
    run, out, log = folder / name, folder / f"{name}.json", folder / f"{name}.agents.log"
    with log.open("wb") as file:
        command = [sys.executable, "-m", TOOLS, str(run), str(out), *map(str, agents)]
        playing = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            subprocess.run(penstock("run", str(config), *every, *overrides), check=True, stdout=subprocess.DEVNULL)
            code = playing.wait(JOIN_S)
        except BaseException:
            playing.kill()
            raise
    if code:
        raise ConfigError(f"the agents ended with exit code {code}; see {log}")
    return json.loads(out.read_text())


def _load(console: Console, config: Path, folder: Path, sessions: int, think_s: float, steps: int) -> Load:
    console.print(f"{sessions} agents at once …")
    groups = max(1, sessions // N)
    seen = _played(
        config, folder, "load", [sessions, think_s, 0],
        [
            f"gateway.sessions={2 * sessions}", f"gate.groups_per_step={max(1, groups // 4)}", "gate.max_lag=16",
            f"gate.window={4 * max(1, groups // 4)}", f"trainer.steps={steps}",
        ],
    )  # fmt: skip
    summary = json.loads((folder / "load" / "summary.json").read_text())
    seconds = steps_of(folder / "load")[-1]["train_s"]
    return Load(np.array(seen["turns"]), seen["finished"], summary, seconds)


def _print_load(console: Console, load: Load, sessions: int, think_s: float) -> None:
    table = Table(title=f"{sessions} agents, each turn after a pause of {think_s:g} s on average: ms")
    for column in ("", "p50", "p90", "p99", "most"):
        table.add_column(column)
    whole, engine = load.turns[:, 0], load.turns[:, 1]
    for name, values in (("the engine", engine), ("added on the way", whole - engine), ("the agent waits", whole)):
        marks = np.percentile(values * 1000, [50, 90, 99, 100])
        table.add_row(name, *(f"{mark:.0f}" for mark in marks))
    console.print(table)
    lost, twice = load.summary["groups_lost"], load.summary["groups_trained_twice"]
    console.print(
        f"{len(load.turns):,} turns in {load.seconds:.0f} s: {len(load.turns) / load.seconds:.0f} turns/s; "
        f"{load.finished:,} sessions finished, groups lost {lost}, trained twice {twice}",
        highlight=False,
    )


def _tools(console: Console, config: Path, folder: Path, lag: int, steps: int, tool_s: float) -> Row:
    console.print(f"η = {lag} …")
    count, name = steps * (1 + lag), f"lag-{lag}"
    sessions = (lag + 2) * GROUPS * N
    _played(
        config, folder, name, [sessions, 0, tool_s],
        [
            f"gateway.sessions={sessions}", f"gate.groups_per_step={GROUPS}", f"gate.max_lag={lag}", "gate.window=1",
            f"trainer.steps={count}",
        ],
    )  # fmt: skip
    rows = steps_of(folder / name)
    settling = max(1, min(len(rows) // 3, 2 * (1 + lag)))
    seconds = (rows[-1]["train_s"] - rows[settling - 1]["train_s"]) / (len(rows) - settling)
    return Row(f"η = {lag}", seconds, float(np.mean([row["lag_mean"] for row in rows[settling:]])))


def _trl(console: Console, config: Path, folder: Path, steps: int, tool_s: float) -> Row:
    need_trl(console)
    console.print("trl …")
    (folder / "trl").mkdir()
    course = run_trl(config, folder / "model-run", folder / "trl", steps, 0, 2, tool_s=tool_s, groups=GROUPS)
    settling = max(1, min(2, steps // 3))
    seconds = (course.seconds[-1] - course.seconds[settling - 1]) / (len(course.seconds) - settling)
    return Row("TRL GRPOTrainer, rollout_func", seconds)


def _print_tools(console: Console, rows: list[Row], tool_s: float) -> None:
    base = next((row for row in rows if row.name == "η = 0"), rows[0])
    table = Table(title=f"steps of {GROUPS * N} sessions with a tool that takes {tool_s:g} s on average, long-tailed")
    for column in ("", "s/step", "steps/s", f"x {base.name}", "mean lag"):
        table.add_column(column)
    for row in rows:
        lag = "-" if np.isnan(row.lag) else f"{row.lag:.2f}"
        table.add_row(
            row.name, f"{row.per_step:.2f}", f"{1 / row.per_step:.2f}", f"{base.per_step / row.per_step:.2f}", lag
        )
    console.print(table)
    console.print(TRL, highlight=False)
