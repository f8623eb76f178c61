"""A whole run of a model in bf16 whose head is in fp32, in trainer, rollout and reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import SHORT, Run, check_promises


@pytest.mark.chaos
def test_engine_and_trainer_agree_with_the_head_in_fp32(tmp_path: Path) -> None:
    wide = ["model.dtype=bfloat16", "model.head_dtype=float32", "trainer.algorithm.kl.coefficient=0.001"]
    run = Run(tmp_path, [*SHORT, *wide, "gate.max_lag=0", "gate.prefetch=null"])
    check_promises(run.wait())
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    found = [row["mismatch_kl_k3"] for row in steps if "mismatch_kl_k3" in row]
    assert len(found) == 6 and max(found) < 0.005, "a tenth of what is warned of"
