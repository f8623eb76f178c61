"""A whole run that trains an adapter, on two ranks, one of which is killed."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import warm
from tests.e2e.runs import SHORT, Run, check_promises


@pytest.mark.slow
def test_a_killed_rank_costs_time_and_the_adapter_loads(tmp_path: Path) -> None:
    more = ["trainer.ranks=2", "trainer.lora={rank: 4, publish: adapter}", "weights.transport=gloo"]
    more += ["trainer.steps=12", "trainer.checkpoint.every=4", "reference.in_trainer=true"]
    more += ["trainer.algorithm.kl.coefficient=0.01", "model.warm_start.steps=60", "trainer.optimizer.lr=0.003"]
    run = Run(tmp_path, [*SHORT, *more])
    run.wait_for_step(4)
    every = [p for p in psutil.process_iter(["cmdline"]) if str(run.folder) in (p.info["cmdline"] or [])]
    (victim,) = [p for p in every if p.environ().get("RANK") == "1"]
    victim.kill()
    summary = run.wait(300)
    check_promises(summary)
    assert summary["steps"] == 12 and summary["restarts"] >= 1
    rows = [row for row in map(json.loads, (run.folder / "metrics.jsonl").open()) if "train_s" in row]
    assert rows[0]["reference_kl"] == pytest.approx(0, abs=1e-4) and rows[-1]["reference_kl"] > 1e-4, (
        "from what the policy was at first"
    )
    assert not list((run.folder / "logs").glob("reference*"))
    received = [row["bytes_received"] for row in map(json.loads, (run.folder / "weights.jsonl").open())]
    assert 0 < max(received) < 0.2 * (run.folder / "model" / "model.safetensors").stat().st_size, "the adapter alone"
    path = run.folder / "checkpoints" / "step-000012"
    assert sorted(file.name for file in path.glob("adapter*")) == ["adapter_config.json", "adapter_model.safetensors"]
    assert not (path / "model.safetensors").exists()
    model = AutoModelForCausalLM.from_pretrained(path)
    tokens = AutoTokenizer.from_pretrained(path)("sort ba=", return_tensors="pt")
    merged = tmp_path / "merged"
    warm.run("merge", str(path), str(merged)).check_returncode()
    with torch.no_grad():
        logits = [each(**tokens).logits for each in (model, AutoModelForCausalLM.from_pretrained(merged))]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
