"""A run on a real Slurm: a node dies under a rollout, and the run's own job is queued again in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.services.runtime.lines import read_lines
from tests.clusters.slurm import CPUS, Slurm, missing
from tests.deploy.stack import until
from tests.e2e.runs import QUICKSTART, ROOT, check_promises

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(missing()), reason=f"no Slurm here (Debian: slurm-wlm): {', '.join(missing())}"),
]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path / "slurm", nodes=4)
    cluster.start()
    yield cluster
    cluster.stop()


def launch(slurm: Slurm, *arguments: str) -> str:
    command = [sys.executable, "-m", "penstock.pipeline.cli", "launch", "slurm", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=slurm.environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps(folder: Path) -> int:
    return len({row["step"] for row in read_lines(folder / "ledger.jsonl")})


def test_a_node_dies_and_the_run_moves(tmp_path: Path, slurm: Slurm) -> None:
    folder = tmp_path / "runs" / "run"
    said = launch(
        slurm, str(QUICKSTART), f"run.folder={folder.parent}", "run.name=run", "rollout.count=2", "trainer.steps=300",
        "--network", "127.0.0.0/8", f"--sbatch=--cpus-per-task={CPUS}", "--time", "1:00:00",
    )  # fmt: skip
    assert "job 1, run: the run: 4 CPUs" in said and "job 2, run-rollout: 2 x 1 rollout: 1 CPUs each" in said

    until("both rollouts train", lambda: steps(folder) >= 20, 300)
    _, node, _ = slurm.jobs()["2_1"]
    assert slurm.kill_node(node) >= 6, "slurmd, slurmstepd, the script, penstock join, the fork server, the rollout"
    until("the task is queued again", lambda: slurm.jobs()["2_1"][0] == "PENDING", 120)
    slurm.start_soon("2_1")
    until("the task is on another node", lambda: slurm.jobs()["2_1"][1] not in ("", node), 120)
    behind = steps(folder)
    until("the run goes on", lambda: steps(folder) > behind + 10, 120)

    slurm.ask("scancel", "--batch", "--signal=USR1", "1")  # what Slurm sends before a time limit
    until("it waits in the queue", lambda: slurm.jobs()["1"][0] == "PENDING", 120)
    slurm.start_soon("1")
    assert json.loads((folder / "summary.json").read_text())["outcome"] == "interrupted"
    until("everybody has left", lambda: not slurm.jobs(), 600)
    summary = json.loads((folder / "summary.json").read_text())
    check_promises(summary)
    assert summary["steps"] == 300 and summary["reward_last"] > 0.8


def test_guests_are_on_the_trainers_nodes(tmp_path: Path, slurm: Slurm) -> None:
    folder = tmp_path / "runs" / "run"
    said = launch(
        slurm, str(QUICKSTART), f"run.folder={folder.parent}", "run.name=run", "run.placement=colocated",
        "trainer.ranks=2", "trainer.nodes=2", "rollout.count=2", "trainer.steps=60", "--network", "127.0.0.0/8",
        f"--sbatch=--cpus-per-task={CPUS}", "--time", "1:00:00",
    )  # fmt: skip
    assert "job 2, run-trainer: 2 x 1 trainer: 3 CPUs each" in said and "job 3" not in said
    until("everybody has left", lambda: not slurm.jobs(), 600)
    summary = json.loads((folder / "summary.json").read_text())
    check_promises(summary)
    assert summary["steps"] == 60
    seen = {name for row in read_lines(folder / "actors.jsonl") for name in row["actors"]}
    assert {"rollout-0-0", "rollout-1-0", "reference-0-0", "reference-1-0", "trainer"} <= seen


def test_what_cannot_work_is_told_before_anything_is_submitted(tmp_path: Path, slurm: Slurm) -> None:
    command = [sys.executable, "-m", "penstock.pipeline.cli", "launch", "slurm", str(QUICKSTART)]
    command += [f"run.folder={tmp_path}", "--network", "127.0.0.0/8"]
    done = subprocess.run(
        [*command, "--partition=none"], cwd=ROOT, env=slurm.environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "--partition: sinfo knows none that is called 'none'" in done.stderr
    wrong = [*command, "--no-gpus", "--sbatch=--no-such-option"]
    done = subprocess.run(wrong, cwd=ROOT, env=slurm.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "sbatch: " in done.stderr and "slurm --resume" in done.stderr
    assert not slurm.jobs()
