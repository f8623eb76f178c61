"""A commit makes step and version durable in one turn: whoever dies around it, nobody sees one without the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.services.runtime.lines import read_lines
from tests.chaos.harness import SMALL, Schedule, carry_out

POINTS = ("commit-applied:2", "commit-durable:4", "trained:6", "committed:8", "commit-durable:10", "published:11")


@pytest.mark.slow
def test_broker_and_trainer_die_on_either_side_of_a_commit(tmp_path: Path) -> None:
    plan = Schedule(0, acts=(), points=POINTS)
    summary = carry_out(tmp_path, plan, [*SMALL, "trainer.steps=14"])
    assert summary["steps"] == 14 and summary["groups_trained"] == 14 * 8
    assert summary["restarts"] >= len(POINTS)
    folder = tmp_path / "run"
    ledger = {row["step"]: row["digest"] for row in read_lines(folder / "ledger.jsonl")}
    loads = read_lines(folder / "weights.jsonl")
    assert sorted(ledger) == list(range(14)) and loads
    for row in loads:  # what a rollout serves is what some commit of that step has said
        said = [line["digest"] for line in read_lines(folder / "ledger.jsonl") if line["step"] == row["version"] - 1]
        assert not row["version"] or row["digest"] in said
