"""`penstock bench simulate`: real runs beside what `penstock simulate` says of them."""

from __future__ import annotations

import math
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.pipeline.bench.judge import SIGMA
from penstock.pipeline.bench.machine import describe
from penstock.pipeline.bench.scoring import JUDGE
from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.run.command import penstock
from penstock.pipeline.run.summary import steps_of
from penstock.pipeline.simulate.calibrate import like
from penstock.pipeline.simulate.costs import Costs
from penstock.pipeline.simulate.world import World

SETTLING = 6
"""Steps at the start that do not count: the pipeline fills."""


@dataclass(frozen=True)
class Case:
    """A run to be told beforehand."""

    max_lag: int
    rollouts: int
    judge_s: float

    @property
    def name(self) -> str:
        """For people."""
        return f"lag-{self.max_lag}-rollouts-{self.rollouts}-judge-{self.judge_s:g}"

    @property
    def overrides(self) -> list[str]:
        """Of the quickstart's config."""
        judge = (
            f"{{function: '{JUDGE}', timeout_s: 60, options: {{mean_s: {self.judge_s}, most_s: {8 * self.judge_s}}}}}"
        )
        functions = f"[{judge}]" if self.judge_s else "[{function: exact_match}]"
        return [f"gate.max_lag={self.max_lag}", f"rollout.count={self.rollouts}", f"reward.functions={functions}"]

    def costs(self, known: Costs) -> Costs:
        """With what the judge takes."""
        spread = math.sqrt(math.expm1(SIGMA**2))
        return known.model_copy(
            update={"reward_s": self.judge_s, "reward_spread": spread, "reward_most_s": 8 * self.judge_s}
        )


CASES = (Case(2, 1, 0.0), Case(0, 2, 0.5), Case(1, 1, 0.5), Case(2, 2, 1.0), Case(4, 2, 1.0))


def bench(console: Console, config: Path, folder: Path, steps: int) -> None:
    """A run with η = 0 shows what things cost; then come `CASES`, each simulated and run."""
    if folder.exists():
        raise ConfigError(f"--folder: {folder} exists; choose another folder")
    console.print("making the model …")
    subprocess.run(penstock("prepare", str(config), "--folder", str(folder / "model-run")), check=True)
    model = f"model={{type: pretrained, path: {folder / 'model-run' / 'model'}, dtype: float32}}"
    same = [model, "prompts.eval=null", "trainer.algorithm.kl.coefficient=0", "gate.prefetch=null"]
    same += ["trainer.checkpoint.every=1000000", f"trainer.steps={steps}"]
    calibration = _run(console, config, folder, "calibration", [*same, *Case(0, 1, 0.0).overrides])
    known = like(calibration, console.print)
    table = Table(title="steps/s, simulated and run")
    for column in ("max_lag", "rollouts", "judge", "simulated", "run", "simulated / run"):
        table.add_column(column, justify="right")
    for case in CASES:
        overrides = [*same, *case.overrides]
        told = World(load(config, overrides), case.costs(known), steps).run().steps_per_s
        rows = steps_of(_run(console, config, folder, case.name, overrides))[SETTLING:]
        found = (len(rows) - 1) / (rows[-1]["time"] - rows[0]["time"])
        judge = f"{case.judge_s:g} s" if case.judge_s else "-"
        table.add_row(
            str(case.max_lag), str(case.rollouts), judge, f"{told:.2f}", f"{found:.2f}", f"{told / found:.2f}"
        )
    console.print(table)
    console.print(f"costs from a run with max_lag 0 and one rollout; {describe()}", highlight=False)


def _run(console: Console, config: Path, folder: Path, name: str, overrides: list[str]) -> Path:
    console.print(f"{name} …")
    command = penstock("run", str(config), f"run.folder={folder}", f"run.name={name}", *overrides)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / name
