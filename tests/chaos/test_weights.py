"""Rollouts and the trainer die, stop and join in the middle of publishing: the version comes whole to whoever lives."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.services.runtime.failpoint import VARIABLE
from tests import warm
from tests.chaos.harness import COMMON, SMALL
from tests.e2e.runs import Run, check_promises

PHASES = ("proposed", "received", "verified", "swapped", "acknowledged")
BUCKETS = ["weights.bucket_mb=0.25", "weights.stall_s=3", "weights.deadline_s=5"]


def loads(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "weights.jsonl").read_text().splitlines()]


def events(run: Run, actor: str, event: str) -> list[dict[str, Any]]:
    lines = (run.folder / "logs" / f"{actor}.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == event]


def receivers(run: Run) -> set[str]:
    """Who has been served a version."""
    return {row["receiver"] for row in loads(run)}


def shared_an_epoch(run: Run, who: set[str]) -> bool:
    """Whether one broadcast has served all of them."""
    together: dict[int, set[str]] = {}
    for row in loads(run):
        if row["transport"] == "gloo":
            together.setdefault(row["epoch"], set()).add(row["receiver"])
    return any(who <= members for members in together.values())


def check_versions(run: Run, last: int | None = None) -> None:
    """Whatever was served had the digest that the ledger has for it; version ``last`` was served."""
    ledger = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    committed = {(row["step"] + 1, row["digest"]) for row in ledger}
    served = {(row["version"], row["digest"]) for row in loads(run) if row["version"]}
    assert served <= committed
    assert last is None or max(version for version, _ in served) == last


@pytest.mark.parametrize(
    "transport", [pytest.param("gloo", marks=pytest.mark.slow), pytest.param("auto", marks=pytest.mark.chaos)]
)
def test_a_receiver_dies_in_every_phase_and_the_trainer_in_the_middle(tmp_path: Path, transport: str) -> None:
    points = [f"receiver-{phase}:{version}" for version, phase in zip(range(2, 12, 2), PHASES, strict=True)]
    points.append("publishing:13")
    log = tmp_path / "reached"
    os.environ[VARIABLE], os.environ["PENSTOCK_KILL_LOG"] = ",".join(points), str(log)
    try:
        overrides = [*COMMON, *SMALL, *BUCKETS, "trainer.steps=16", "rollout.count=3", f"weights.transport={transport}"]
        run = Run(tmp_path, overrides)
    finally:
        del os.environ[VARIABLE], os.environ["PENSTOCK_KILL_LOG"]
    summary = run.wait()
    check_promises(summary)
    assert set(log.read_text().split()) == set(points)
    assert summary["steps"] == 16
    check_versions(run, 16)
    broken = events(run, "trainer", "the epoch broke; receivers ask for the rest")  # where one died in a broadcast
    assert all("rank 1 (rollout-" in row["error"] for row in broken), "the ranks are named"


@pytest.mark.chaos
def test_one_stops_past_the_deadline_and_two_join_while_versions_are_published(tmp_path: Path) -> None:
    overrides = [*COMMON, *SMALL, *BUCKETS, "trainer.steps=100000", "rollout.count=2", "weights.transport=gloo"]
    run = Run(tmp_path, [*overrides, "broker.dead_after_s=60"])
    run.wait_for_step(3)
    started = time.monotonic()
    while not shared_an_epoch(run, {"rollout-0", "rollout-1"}):  # who was never reached cannot be voted out
        assert time.monotonic() - started < 60, "two rollouts never took part in one broadcast"
        time.sleep(0.1)
    stopped = run.actors()["rollout-1"]
    line = stopped.cmdline()
    joined = []
    for name in ("late-0", "late-1"):
        where = ["--config", str(run.folder / "config.yaml"), "--folder", str(run.folder), "--name", name]
        where += ["--broker", line[line.index("--broker") + 1]]
        with (tmp_path / name).open("wb") as out:
            joined.append(warm.start("serve", "rollout", *where, output=out))
    stopped.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    while not events(run, "trainer", "receiver is late: voted out"):
        assert time.monotonic() - started < 20, "nobody noticed that a receiver has stopped"
        time.sleep(0.1)
    stopped.send_signal(signal.SIGCONT)
    started = time.monotonic()
    while not shared_an_epoch(run, {"late-0", "late-1", "rollout-0"}) or not receivers(run) >= {"rollout-1"}:
        assert time.monotonic() - started < 120, f"only {sorted(receivers(run))} were served, or never together"
        time.sleep(0.2)
    run.process.send_signal(signal.SIGINT)
    for process in joined:  # nobody supervises them: they end when the broker says so
        assert process.wait(60) == 0
    summary = run.wait(60, code=130)
    check_promises(summary, "interrupted")
    check_versions(run)
    out = events(run, "trainer", "receiver is late: voted out")
    assert out[0]["receiver"].startswith("rollout-1#") and 5 <= out[0]["waited_s"] < 10
    seeded = next(row for row in loads(run) if row["receiver"] == "late-0")
    assert seeded["transport"] in ("snapshot", "gloo")
    assert not psutil.pid_exists(stopped.pid)
