"""The examples run as they stand; a few steps of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipeline.run.summary import steps_of
from tests.e2e.runs import ROOT, Run, check_promises

SHORT = ["trainer.steps=3", "prompts.eval=null", "gate.groups_per_step=8", "gate.prefetch=8"]
TINY = ["model.warm_start.steps=2", "model.warm_start.batch=16"]
METRICS = {"own-loss": "bounded_share", "own-correction": "is_weight_kept", "own-data": "reward"}
"""What each one's own code shows of itself in every step."""


@pytest.mark.slow
@pytest.mark.parametrize("name", METRICS)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    run = Run(tmp_path, [*SHORT, *TINY], ROOT / "examples" / name / "config.yaml")
    check_promises(run.wait(200))
    rows = steps_of(run.folder)
    assert len(rows) == 3 and all(METRICS[name] in row for row in rows)
