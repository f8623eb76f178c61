"""A run whose trainer and rollouts share their devices: never at work at the same time, and otherwise as any other."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from penstock.pipeline.run.summary import steps_of
from tests.e2e.runs import ROOT, WHOLE, Run, check_promises, free_port
from tests.e2e.test_join import join, until

PPO = ["trainer.algorithm.preset=ppo", "critic.optimizer.lr=1.0e-3"]
COLOCATED = [*WHOLE, "run.placement=colocated", "run.log_level=debug"]

KILLED = "trained:2,published:3,critic-taken:1,critic-valued:3,critic-trained:4"

SERVER = str(ROOT / "tests" / "e2e" / "sleeping_judge.py")

Span = tuple[datetime, datetime]


def spans(run: Run, actor: str, begin: str, end: str) -> list[Span]:
    """From each ``begin`` in the actor's log to the ``end`` behind it."""
    rows = [json.loads(line) for line in (run.folder / "logs" / f"{actor}.jsonl").read_text().splitlines()]
    found, since = [], None
    for row in rows:
        if row["event"] == begin:
            since = datetime.fromisoformat(row["timestamp"])
        elif row["event"] == end and since:
            found.append((since, datetime.fromisoformat(row["timestamp"])))
            since = None
    return found


def overlaps(some: list[Span], others: list[Span]) -> list[tuple[Span, Span]]:
    return [(one, other) for one in some for other in others if one[0] < other[1] and other[0] < one[1]]


@pytest.mark.parametrize(
    ("lag", "more"),
    [
        (1, PPO),
        pytest.param(0, ["trainer.ranks=2", "trainer.lora={rank: 4}"], marks=pytest.mark.chaos),
        pytest.param(2, [*PPO, "trainer.ranks=2", "critic.ranks=2", "critic.lora={rank: 4}"], marks=pytest.mark.chaos),
    ],
)
def test_they_take_turns(tmp_path: Path, lag: int, more: list[str]) -> None:
    """The trainer, a critic where there is one, and guests, all of whom sleep while one of these works."""
    run = Run(tmp_path, [*COLOCATED, f"gate.max_lag={lag}", *more])
    summary = run.wait()
    check_promises(summary)
    assert summary["steps"] == 6 and summary["restarts"] == 0 and "eval_after" in summary
    learners = ("trainer", "critic") if more[: len(PPO)] == PPO else ("trainer",)
    ranks = [rank for rank in ("", "-rank1") if (run.folder / "logs" / f"trainer{rank}.jsonl").is_file()]
    turns = {kind: [s for rank in ranks for s in spans(run, kind + rank, "at work", "at rest")] for kind in learners}
    assert all(len(found) >= 6 for found in turns.values())
    assert not overlaps(turns["trainer"], turns.get("critic", []))
    for guest in ("rollout-0", "rollout-1", "reference-0"):
        awake = spans(run, guest, "awake", "asleep")
        assert len(awake) >= 2, guest
        assert not any(overlaps(turn, awake) for turn in turns.values()), guest
    rows = steps_of(run.folder)
    assert all(0 <= row[f"{prefix}turn_wait_s"] < 30 for row in rows for prefix in ["", "critic_"][: len(learners)])


@pytest.mark.chaos
def test_guests_come_with_each_machine_of_the_trainer(tmp_path: Path) -> None:
    """And one of the machines dies."""
    more = ["run.elsewhere=[trainer,rollout,reference]", "broker.bind=tcp://127.0.0.0/8:0", "trainer.ranks=2"]
    run = Run(tmp_path, [*COLOCATED, *more, "trainer.nodes=2", "trainer.steps=30", "trainer.checkpoint.every=5"])
    until(lambda: (run.folder / "config.yaml").is_file(), "the run's folder")
    joined = {name: join(run.folder, tmp_path / name, "trainer", "--name", name) for name in ("one", "two")}
    run.wait_for_step(10)
    assert {"rollout-one-0", "rollout-two-0", "reference-one-0", "reference-two-0"} <= run.actors().keys()
    victim = joined.pop("two")
    for process in [psutil.Process(victim.pid), *psutil.Process(victim.pid).children(recursive=True)]:
        process.kill()
    victim.wait()
    joined["three"] = join(run.folder, tmp_path / "three", "trainer", "--name", "three")
    assert [process.wait(240) for process in joined.values()] == [0, 0]
    summary = run.wait()
    check_promises(summary)
    assert summary["steps"] == 30
    ranks = [span for log in ("trainer", "trainer-rank1") for span in spans(run, log, "at work", "at rest")]
    for guest in ("rollout-one-0", "reference-one-0", "rollout-three-0"):
        assert not overlaps(ranks, spans(run, guest, "awake", "asleep")), guest


def test_learners_that_are_killed_at_work_give_the_devices_back(tmp_path: Path) -> None:
    """Also a critic before it has said its values, and behind that; and a rollout that is killed while it sleeps is
    back when it is awake."""
    import os

    from penstock.services.runtime.failpoint import VARIABLE

    os.environ[VARIABLE], os.environ["PENSTOCK_KILL_LOG"] = KILLED, str(tmp_path / "reached")
    try:
        run = Run(
            tmp_path, [*COLOCATED, *PPO, "trainer.checkpoint.every=2", "critic.checkpoint.every=3", "gate.max_lag=2"]
        )
    finally:
        del os.environ[VARIABLE], os.environ["PENSTOCK_KILL_LOG"]
    run.wait_for_step(4)
    if victim := run.actors().get("rollout-0"):
        victim.kill()
    summary = run.wait()
    check_promises(summary)
    assert summary["groups_trained"] == 6 * 8 and summary["restarts"] >= 5


def test_a_judge_that_the_run_starts_sleeps_while_a_learner_works(tmp_path: Path) -> None:
    """Nobody asks it meanwhile, and one that is killed is started again behind the learner's turn."""
    log, port = tmp_path / "judge.jsonl", free_port()
    judge = {
        "command": f"python {SERVER} {port} {log}", "ready": f"http://127.0.0.1:{port}/",
        "sleep": f"http://127.0.0.1:{port}/sleep", "wake": f"http://127.0.0.1:{port}/wake_up",
    }  # fmt: skip
    functions = [{"function": "judge", "options": {"url": f"http://127.0.0.1:{port}/v1", "model": "judge"}}]
    more = ["gate.max_lag=1", "trainer.steps=8", f"programs={json.dumps({'judge': judge})}"]
    run = Run(tmp_path, [*COLOCATED, *more, f"reward.functions={json.dumps(functions)}"])
    run.wait_for_step(3)
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] and process.info["cmdline"][-1] == str(log) and SERVER in process.info["cmdline"]:
            process.kill()
    summary = run.wait()
    check_promises(summary)
    assert summary["steps"] == 8 and summary["restarts"] == 1
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert {row["event"] for row in rows} == {"loading", "asleep", "awake"}
    turns = spans(run, "trainer", "at work", "at rest")
    logged = log.read_text()
    (run.folder / "logs" / "judge.jsonl").write_text(logged)
    awake = spans(run, "judge", "awake", "asleep")
    assert len(turns) >= 8 and len(awake) >= 3 and not overlaps(turns, awake)
    loading = [datetime.fromisoformat(row["timestamp"]) for row in rows if row["event"] == "loading"]
    assert len(loading) == 2 and not any(begin < loading[1] < end for begin, end in turns)
