"""Tasks of several turns through the whole pipeline: what misbehaves costs its own, what is killed loses nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

import penstock
from penstock.pipeline.run.summary import steps_of
from tests.e2e.runs import ROOT, WHOLE, Run, check_promises

EXAMPLE = ROOT / "examples" / "own-environment" / "config.yaml"
TINY = [*WHOLE, "prompts.eval=null"]


def test_an_environment_that_misbehaves_costs_its_own_trajectories(tmp_path: Path) -> None:
    options = f"options: {{folder: '{tmp_path}'}}, timeout_s: 1.0, max_turns: 3"
    moody = f"{{environment: 'tests.e2e.moody_environment:Moody', {options}}}"
    run = Run(tmp_path, [*TINY, f"rollout.environment={moody}"], EXAMPLE)
    summary = run.wait()
    check_promises(summary)
    assert summary["steps"] == 6 and summary["groups_trained"] == 48
    assert summary["groups_dropped"] <= 1, "of one group three of four may be hit"
    kinds = summary["reward_failures"]["reward/environment"]
    for wrong in ("raised ValueError", "returned list", "timed out", "crashed"):
        assert any(wrong in kind for kind in kinds), kinds
    assert sum(kinds.values()) == summary["rewards_failed"] <= 40
    assert all(row["turns"] > 1 for row in steps_of(run.folder))
    assert "step timed out" in (run.folder / "report.html").read_text()


@pytest.mark.chaos
def test_turns_that_are_killed_lose_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, [*TINY, "trainer.steps=90", "replay.archive=all", "run.max_restarts=30"], EXAMPLE)
    run.wait_for_step(2)
    for turn in range(6):
        victims = ["rollout-0", "environment", "rollout-1", "trainer", "environment", "reward-0"]
        _kill(run, victims[turn])
        time.sleep(1.5)
    summary = run.wait()
    check_promises(summary)
    assert summary["restarts"] >= 4 and summary["steps"] == 90
    rows = list(penstock.rollouts(run.folder))
    assert len(rows) == summary["groups_trained"] * 4 and {row["finish"] for row in rows} <= {"stop", "length"}


def _kill(run: Run, victim: str) -> None:
    if victim == "environment":
        for name in ("rollout-0", "rollout-1"):
            for child in run.actors()[name].children() if name in run.actors() else []:
                if "penstock.services.user_processes.child" in child.cmdline():
                    os.kill(child.pid, signal.SIGKILL)
                    return
        return
    try:
        run.actors()[victim].kill()
    except (KeyError, psutil.NoSuchProcess):
        pass  # it is being started again
