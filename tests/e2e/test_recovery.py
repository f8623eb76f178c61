"""Runs that are stopped and go on, and processes that stop without dying."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from penstock.pipeline.run.summary import steps_of
from penstock.services.runtime.lines import read_lines
from tests import warm
from tests.e2e.runs import QUICKSTART, SHORT, WHOLE, Run, check_promises


def resume(run: Run, overrides: list[str]) -> subprocess.CompletedProcess[str]:
    return warm.run("run", str(QUICKSTART), "--resume", str(run.folder), *SHORT, *overrides)


def test_an_interrupted_run_goes_on_with_another_bound_and_batch(tmp_path: Path) -> None:
    run = Run(tmp_path, [*SHORT, "trainer.steps=100000"])
    run.wait_for_step(3)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 130
    before = json.loads((run.folder / "summary.json").read_text())
    steps = before["steps"] + 4
    done = resume(run, [f"trainer.steps={steps}", "gate.max_lag=1", "gate.groups_per_step=5", "gate.prefetch=null"])
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["groups_lost"] == 0 and summary["groups_trained_twice"] == 0
    assert all(row["lag_max"] <= row["max_lag"] for row in steps_of(run.folder))
    rows = {row["step"]: row for row in read_lines(run.folder / "ledger.jsonl")}
    ledger = [rows[step] for step in range(before["steps"], steps)]
    # What was taken when the run was interrupted stays as it was taken, bound and all.
    taken_before = [row for row in ledger if row["max_lag"] != 1]
    assert taken_before == ledger[: len(taken_before)] and len(taken_before) <= 1
    sizes = [len(row["groups"]) for row in ledger]
    assert sizes == [8] * len(taken_before) + [5] * (4 - len(taken_before))
    assert summary["steps"] == steps and summary["groups_trained"] == before["steps"] * 8 + sum(sizes)
    assert not run.actors()
    again = resume(run, [f"trainer.steps={steps}", "gate.max_lag=1", "gate.groups_per_step=5", "gate.prefetch=null"])
    assert again.returncode == 0, again.stdout + again.stderr  # complete already: says so and ends
    refused = resume(run, ["run.seed=7"])
    assert refused.returncode == 2 and "run.seed: 7, but the run began with 0" in refused.stderr


@pytest.mark.chaos
def test_a_run_whose_machine_went_down_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, [*SHORT, "trainer.steps=100000", "trainer.checkpoint.every=4"])
    run.wait_for_step(6)
    everybody = run.actors()
    for process in [*everybody.values(), run.process]:
        process.send_signal(signal.SIGKILL)
    run.process.wait(10)
    psutil.wait_procs(list(everybody.values()), 10)
    done = resume(run, ["trainer.steps=30", "trainer.checkpoint.every=4"])
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run.folder / "summary.json").read_text())
    check_promises(summary)
    assert summary["steps"] == 30 and summary["groups_trained"] == 30 * 8


@pytest.mark.chaos
def test_a_process_that_is_asked_to_leave_is_started_again(tmp_path: Path) -> None:
    run = Run(tmp_path, [*SHORT, "trainer.steps=12"])
    run.wait_for_step(2)
    run.actors()["reward-0"].terminate()
    summary = run.wait()
    check_promises(summary)
    assert summary["restarts"] == 1 and summary["steps"] == 12


@pytest.mark.chaos
def test_a_stall_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, [*WHOLE, "trainer.steps=40", "broker.stall_s=2", "broker.dead_after_s=60"])
    run.wait_for_step(3)
    trainer = run.actors()["trainer"]
    trainer.suspend()
    log = run.folder / "logs" / "broker.jsonl"
    try:
        for _ in range(100):
            lines = [line for line in log.read_text().splitlines() if '"stall"' in line and '"step": 0' not in line]
            if lines:
                break
            subprocess.run(["sleep", "0.1"], check=True)
    finally:
        trainer.resume()
    reason = json.loads(lines[0])["reason"]
    assert ("trainer#" in reason and "has not committed it" in reason) or "needs a rollout with version" in reason
    check_promises(run.wait())


@pytest.mark.chaos
def test_a_deterministic_run_is_not_continued_on_another_kind_of_machine(tmp_path: Path) -> None:
    run = Run(tmp_path, [*WHOLE, "run.deterministic=true", "trainer.steps=100000"])
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGINT)
    run.process.wait(60)
    machine = run.folder / "machines" / "trainer.json"
    machine.write_text(json.dumps(json.loads(machine.read_text()) | {"instruction_set": "Z80"}))
    done = resume(run, ["run.deterministic=true"])
    assert done.returncode == 1 and "instruction_set" in done.stderr and "recorded 'Z80'" in done.stderr


@pytest.mark.chaos
def test_a_broker_that_listens_everywhere_may_die_and_later_listen_here_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, [*SHORT, "trainer.steps=100000", "prompts.eval=null", "broker.bind=tcp://0.0.0.0:0"])
    run.wait_for_step(2)
    address = (run.folder / "broker.address").read_text()
    run.actors()["broker"].kill()
    run.wait_for_step(len(steps_of(run.folder)) + 3)
    assert (run.folder / "broker.address").read_text() == address
    run.process.send_signal(signal.SIGINT)
    stopped = run.wait(60, code=130)
    again = Run.resumed(run, [f"trainer.steps={stopped['steps'] + 2}", "broker.bind=tcp://127.0.0.1:0"])
    check_promises(again.wait(120))
    assert "//127.0.0.1:" in (run.folder / "broker.address").read_text()


def test_groups_that_teach_nothing_are_filtered_and_replaced(tmp_path: Path) -> None:
    overrides = ["replay.filter=zero_variance", "reward.functions=[{function: 'tests.e2e.rewards:parity'}]"]
    run = Run(tmp_path, [*SHORT, *overrides])
    summary = run.wait()
    check_promises(summary)
    assert summary["groups_dropped"] > 0 and summary["groups_trained"] == 48


@pytest.mark.chaos
def test_broker_and_store_may_die_while_everybody_leaves(tmp_path: Path) -> None:
    run = Run(tmp_path, [*SHORT, "rollout.count=2", "broker.dead_after_s=2"])
    run.wait_for_step(1)
    actors = run.actors()
    actors["rollout-1"].suspend()  # found dead, so the run is completed without it; and waited for at the end
    deadline = time.monotonic() + 60
    while "done: step 6/6" not in run.output.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for name in ("redis", "broker"):
        actors[name].send_signal(signal.SIGKILL)
    actors["rollout-1"].resume()
    summary = run.wait()
    check_promises(summary)
    assert summary["steps"] == 6 and summary["restarts"] == 2


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.chaos)])
def test_a_broker_that_ends_before_the_run_has_begun_is_started_again(tmp_path: Path, how: signal.Signals) -> None:
    run = Run(tmp_path, SHORT)
    deadline = time.monotonic() + 120
    while not (run.folder / "broker.address").is_file():
        assert time.monotonic() < deadline and run.process.poll() is None, run.output.read_text()
        time.sleep(0.01)
    run.actors()["broker"].send_signal(how)
    summary = run.wait()
    check_promises(summary)
    assert summary["steps"] == 6 and summary["restarts"] == 1
