"""Steps that prompts do not suffice for."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipeline.config import load
from penstock.pipeline.preflight import data
from penstock.pipeline.preflight.report import Report

FILE = """
model: {type: tiny}
prompts: {train: {type: sort, size: 1000}}
gate: {groups_per_step: 32}
reward: {functions: [{function: exact_match}]}
trainer: {steps: 100000}
"""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["prompts.epochs=2", "trainer.optimizer.schedule=cosine"], "trainer.steps=100000: .*set it to 63"),
        (["prompts.epochs=2"], None),
        (["trainer.optimizer.schedule=cosine"], None),
        (["prompts.epochs=2", "trainer.optimizer.schedule=linear", "trainer.steps=64"], None),
    ],
)
def test_a_learning_rate_that_would_not_fall_is_told_of(tmp_path: Path, given: list[str], said: str | None) -> None:
    (tmp_path / "run.yaml").write_text(FILE)
    report = Report()
    data.look(load(tmp_path / "run.yaml", given), report)
    assert not report.problems and len(report.notes) == bool(said)
    if said:
        (note,) = report.notes
        assert note.startswith(said.partition(":")[0]) and note.endswith("set it to 63"), note
