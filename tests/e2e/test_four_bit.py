"""A whole run of an adapter beside a model in 4 bits: what engines sample is what is trained, and the reference began
there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import warm
from tests.e2e.runs import QUICKSTART, WHOLE, Run, check_promises

pytest.importorskip("bitsandbytes", reason="penstock[qlora] is not installed: make test-low-bits")


@pytest.mark.slow
def test_everybody_goes_by_what_the_matrices_are(tmp_path: Path) -> None:
    more = ["trainer.lora={rank: 4, quantize: nf4}", "trainer.steps=6", "trainer.checkpoint.every=3"]
    run = Run(tmp_path, [*WHOLE, *more])
    summary = run.wait(300)
    check_promises(summary)
    first = next(row for row in map(json.loads, (run.folder / "metrics.jsonl").open()) if row["kind"] == "step")
    assert abs(first["mismatch_kl_k3"]) < 1e-6 and abs(first["reference_kl"]) < 1e-6
    path = run.folder / "checkpoints" / "step-000006"
    assert json.loads((path / "penstock_base.json").read_text()) == {"quantize": "nf4", "dtype": "float32"}
    done = warm.run(
        "eval", str(path), str(QUICKSTART), f"run.folder={tmp_path}", "run.name=eval", "prompts.eval_size=64"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "eval" / "summary.json").read_text())["eval_before"]
    assert found == pytest.approx(summary["eval_after"], abs=0.25), "the adapter was asked, on other prompts"
