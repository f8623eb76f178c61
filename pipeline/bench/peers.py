"""`penstock bench peers`: a whole run beside another trainer's, on the same task, model, warm start and machine."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from penstock.pipeline.bench.machine import describe
from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.run.command import penstock
from penstock.pipeline.run.summary import steps_of

TRL = "trl==1.16.0"
GOAL = 0.9
WINDOW = 5


@dataclass(frozen=True)
class Course:
    """Rewards of a run's steps, with the seconds since training began at which each was complete."""

    name: str
    seconds: list[float]
    rewards: list[float]
    generated_tokens: int

    def to_goal(self) -> tuple[int, float] | None:
        """Step and seconds at which the mean over `WINDOW` steps first exceeds `GOAL`."""
        for end in range(WINDOW, len(self.rewards) + 1):
            if statistics.mean(self.rewards[end - WINDOW : end]) > GOAL:
                return end, self.seconds[end - 1]
        return None


def bench_trl(console: Console, config_path: Path, folder: Path, steps: int, seeds: list[int], threads: int) -> None:
    """Runs Penstock and TRL's GRPOTrainer in turn, once for each seed, and prints a table."""
    need_trl(console)
    rows: list[tuple[int, Course, Course]] = []
    for seed in seeds:
        here = folder / f"seed-{seed}"
        if here.exists():
            raise ConfigError(f"--folder: {here} exists; choose another folder")
        ours = _run_penstock(console, config_path, here, steps, seed)
        console.print(f"trl, seed {seed} …")
        rows.append((seed, ours, run_trl(config_path, here / "penstock", here, steps, seed, threads)))
    table = Table(title=f"to a {WINDOW}-step mean reward above {GOAL}, from the same warm start")
    for column in (
        "seed",
        "trainer",
        "step",
        "seconds",
        "steps/s",
        "generated tokens/s",
        "last 10",
        "ratio of seconds",
    ):
        table.add_column(column)
    for seed, ours, theirs in rows:
        base = theirs.to_goal()
        for course in (ours, theirs):
            goal = course.to_goal()
            whole = course.seconds[-1]
            ratio = f"{base[1] / goal[1]:.2f}" if goal and base else "-"
            table.add_row(
                str(seed), course.name, str(goal[0]) if goal else "never", f"{goal[1]:.1f}" if goal else "-",
                f"{len(course.seconds) / whole:.2f}", f"{course.generated_tokens / whole:,.0f}",
                f"{statistics.mean(course.rewards[-10:]):.3f}", ratio,
            )  # fmt: skip
    console.print(table)
    console.print(f"ratio: TRL's seconds over the row's. {TRL}; {describe()}", highlight=False)


def need_trl(console: Console) -> None:
    """Installs it into this environment, where it is missing."""
    if importlib.util.find_spec("trl") is None:
        console.print(f"installing {TRL} …")
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", TRL], check=True)


def _run_penstock(console: Console, config: Path, folder: Path, steps: int, seed: int) -> Course:
    console.print(f"penstock, seed {seed} …")
    overrides = [
        f"run.folder={folder}",
        "run.name=penstock",
        f"run.seed={seed}",
        f"trainer.steps={steps}",
        "prompts.eval=null",
    ]
    subprocess.run(penstock("run", str(config), *overrides), check=True, stdout=subprocess.DEVNULL)
    rows = steps_of(folder / "penstock")
    return Course(
        "penstock", [r["train_s"] for r in rows], [r["reward"] for r in rows], rows[-1]["generated_tokens_total"]
    )


def run_trl(
    config: Path,
    run: Path,
    folder: Path,
    steps: int,
    seed: int,
    threads: int,
    judge: str = "",
    mean_s: float = 0.0,
    tool_s: float = 0.0,
    groups: int = 0,
) -> Course:
    """TRL from the warm start in ``run``/model; with the async reward ``judge`` (``module:function``) instead of an
    exact match, which takes ``mean_s`` seconds on average; or as an agent of two turns, with a tool between them that
    takes ``tool_s``. ``groups`` in a step, or as many as the config says."""
    out = folder / "trl.json"
    command = [sys.executable, "-m", "penstock.pipeline.bench.peer_trl", str(config), str(run), str(out)]
    env = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    log = folder / "trl.log"
    with log.open("wb") as file:
        more = [str(steps), str(seed), judge, str(mean_s), str(tool_s), str(groups)]
        done = subprocess.run([*command, *more], env=env, stdout=file, stderr=file)
    if done.returncode:
        typer.echo(log.read_text()[-3000:], err=True)
        raise ConfigError(f"trl ended with exit code {done.returncode}; see {log}")
    found = json.loads(out.read_text())
    return Course("trl", found["seconds"], found["rewards"], found["generated_tokens"])


def check(config_path: Path, command: str) -> None:
    """Raises `ConfigError` unless the config is one that ``bench`` ``command`` can give TRL too."""
    config = load(config_path)
    agents = command == "gateway"
    if config.model.type != "tiny" or config.prompts.train.type != "sort" or (agents and not config.gateway.count):
        task, own = ("model and a gateway", "agent") if agents else ("model", "quickstart")
        raise ConfigError(f"bench {command} compares on the sort task with a tiny {task}: use configs/{own}.yaml")
