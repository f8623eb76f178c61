"""The quickstart as a newcomer runs it, with three processes killed on the way."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.pipeline.config import load
from penstock.services.data import open_source
from tests.e2e.runs import QUICKSTART, Run, check_promises


def greedy_accuracy(path: Path, count: int) -> float:
    """Exact matches of plain transformers on the held-out prompts."""
    config = load(QUICKSTART)
    assert config.prompts.eval
    prompts = open_source(config.prompts.eval["held_out"], held_out=True)[:count]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    inputs = tokenizer([p.text for p in prompts], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    with torch.inference_mode():
        out = model.generate(**inputs, do_sample=False, max_new_tokens=config.rollout.sampling.max_new_tokens)
    answers = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(a.strip() == p.truth for a, p in zip(answers, prompts, strict=True)) / count


@pytest.mark.slow
def test_it_learns_though_a_rollout_the_reward_and_the_reference_are_killed(tmp_path: Path) -> None:
    run = Run(tmp_path, ["trainer.steps=80"], fresh=True)
    for step, actor in ((10, "rollout-1"), (25, "reward-0"), (40, "reference-0")):
        run.wait_for_step(step)
        run.actors()[actor].send_signal(signal.SIGKILL)
    summary = run.wait()
    check_promises(summary)
    assert summary["restarts"] == 3
    assert summary["reward_first"] < 0.45 and summary["reward_last"] >= 0.9
    assert summary["lagging_share"] >= 0.1 and summary["lag_max_seen"] == 2
    newest = sorted((run.folder / "checkpoints").iterdir())[-1]
    assert newest.name == f"step-{summary['steps']:06d}"
    assert greedy_accuracy(newest, 256) == pytest.approx(summary["eval_after"], abs=1 / 256 + 1e-9)
