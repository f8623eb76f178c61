"""`penstock bench lag`: what old experience costs, by how old it may be and by what corrects for it."""

from __future__ import annotations

import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.pipeline.bench.machine import describe
from penstock.pipeline.config import Config, ConfigError, load
from penstock.pipeline.run.command import penstock
from penstock.pipeline.run.resume import changes
from penstock.pipeline.run.start import laid_out
from penstock.pipeline.run.summary import steps_of
from penstock.protocols.run_lock import read_summary

PLAIN = ["trainer.algorithm.loss={type: reinforce}", "trainer.algorithm.kl.coefficient=0"]
CORRECTIONS = {
    "none": PLAIN,
    "token-tis": [*PLAIN, "trainer.algorithm.correction={type: truncated}"],
    "icepop": [*PLAIN, "trainer.algorithm.correction={type: icepop}"],
    "sequence-mask": [*PLAIN, "trainer.algorithm.reject=[{kind: seq_mean_k1, upper: 1.1, of: negative}]"],
    **{name: [f"trainer.algorithm.loss={{type: {name}}}", PLAIN[-1]] for name in ("vespo", "topr", "m2po")},
    "decoupled": [
        "trainer.algorithm.loss={type: ppo_clip, clip_low: 0.2, clip_high: 0.28}",
        "trainer.algorithm.kl.coefficient=0",
        "trainer.algorithm.ratio=proximal",
        "trainer.algorithm.correction={type: truncated}",
        "trainer.mini_batches=2",
    ],
}
LAST = 10


@dataclass(frozen=True)
class Row:
    """The runs of one cell, over its seeds."""

    rewards: list[float]
    """Of each run: the sampled reward, mean of its last steps."""
    lag: float
    """Mean age of the trained tokens, in versions, once the pipeline is full."""
    seconds: float
    """From the start of training to the last step."""


def bench(
    console: Console,
    config: Path,
    folder: Path,
    lags: list[int],
    corrections: list[str],
    seeds: int,
    steps: int,
    rate: float,
) -> None:
    """Runs what is not in ``folder`` yet, and prints a table with a row for each correction and each of ``lags``.
    Raises `ConfigError` where what is there is not whole, or is not what is asked for."""
    start = folder / "model-run"
    wanted: dict[Path, list[str]] = {}
    for seed in range(seeds):
        for lag in lags:
            for name in corrections:
                run = folder / f"{name}-lag{lag}-seed{seed}"
                choices = [*CORRECTIONS[name], f"gate.max_lag={lag}"]
                wanted[run] = _overrides(run, start / "model", choices, seed, steps, rate)
    if not (start / "model").exists():
        console.print("making the tiny model …")
        subprocess.run(penstock("prepare", str(config), "--folder", str(start)), check=True)
    _check_same(start, load(config))
    missing = [run for run, overrides in wanted.items() if not _is_there(config, run, overrides)]
    for number, run in enumerate(missing, 1):
        console.print(f"{number} of {len(missing)}: {run.name} …")
        subprocess.run(penstock("run", str(config), *wanted[run]), check=True, stdout=subprocess.DEVNULL)
    rows: dict[tuple[str, int], Row] = {}
    for name in corrections:
        for lag in lags:
            courses = [steps_of(folder / f"{name}-lag{lag}-seed{seed}") for seed in range(seeds)]
            full = [row["lag_mean"] for course in courses for row in course[min(2 * lag, len(course) - 1) :]]
            rows[name, lag] = Row(
                [statistics.mean(row["reward"] for row in course[-LAST:]) for course in courses],
                statistics.mean(full),
                statistics.mean(course[-1]["train_s"] for course in courses),
            )
    _print(console, rows, steps, rate)


def _overrides(run: Path, model: Path, choices: list[str], seed: int, steps: int, rate: float) -> list[str]:
    return [
        f"run.folder={run.parent}", f"run.name={run.name}", f"run.seed={seed}", f"trainer.steps={steps}",
        f"model={{type: pretrained, path: {model}, dtype: float32}}", "prompts.eval=null", "gate.prefetch=null",
        f"trainer.optimizer.lr={rate}", "trainer.checkpoint.every=1000000", "replay.archive=none", *choices,
    ]  # fmt: skip


def _is_there(config: Path, run: Path, overrides: list[str]) -> bool:
    """The folder ``run`` has this run already. Raises `ConfigError` where it has another, or one that is not whole."""
    if not run.exists():
        return False
    summary = read_summary(run)
    if not summary or summary["outcome"] != "complete":
        raise ConfigError(f"--folder: the run in {run} did not come to its end; remove it, or choose another folder")
    _check_same(run, laid_out(str(config), overrides, None)[0])
    return True


def _check_same(run: Path, config: Config) -> None:
    """Raises `ConfigError` where what is in ``run`` was not made with ``config``."""
    if other := changes(load(run / "config.yaml"), config):
        raise ConfigError(
            f"--folder: {run} was made with another config ({other[0]}); remove it, or choose another folder"
        )


def _print(console: Console, rows: dict[tuple[str, int], Row], steps: int, rate: float) -> None:
    table = Table(title=f"sampled reward after {steps} steps at a learning rate of {rate:g}: mean of the last {LAST}")
    for column in ("correction", "η", "mean lag", "reward", "worst seed", "best seed", "seconds"):
        table.add_column(column)
    for (name, lag), row in rows.items():
        table.add_row(
            name, str(lag), f"{row.lag:.1f}", f"{statistics.mean(row.rewards):.3f}", f"{min(row.rewards):.3f}",
            f"{max(row.rewards):.3f}", f"{row.seconds:.0f}",
        )  # fmt: skip
    console.print(table)
    console.print(describe(), highlight=False)
