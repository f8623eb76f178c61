"""A whole run that trains an adapter, on two ranks, one of which is killed."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.runs import SHORT, Run, check_promises


@pytest.mark.slow
def test_a_killed_rank_costs_time_and_the_adapter_loads(tmp_path: Path) -> None:
    more = ["trainer.ranks=2", "trainer.lora.rank=4", "trainer.steps=30", "trainer.checkpoint.every=5"]
    run = Run(tmp_path, [*SHORT, *more])
    run.wait_for_step(8)
    every = [p for p in psutil.process_iter(["cmdline"]) if str(run.folder) in (p.info["cmdline"] or [])]
    (victim,) = [p for p in every if p.environ().get("RANK") == "1"]
    victim.kill()
    summary = run.wait(300)
    check_promises(summary)
    assert summary["steps"] == 30 and summary["restarts"] >= 1
    path = run.folder / "checkpoints" / "step-000030"
    assert sorted(file.name for file in path.glob("adapter*")) == ["adapter_config.json", "adapter_model.safetensors"]
    assert not (path / "model.safetensors").exists()
    model = AutoModelForCausalLM.from_pretrained(path)
    tokens = AutoTokenizer.from_pretrained(path)("sort ba=", return_tensors="pt")
    assert model(**tokens).logits.isfinite().all()
