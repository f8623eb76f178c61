"""Runs in which answers are given, by the real command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from penstock.pipeline.run.summary import steps_of
from penstock.services.runtime.lines import read_lines
from tests.e2e.runs import ROOT, Run, check_promises

ALONE = ["prompts.eval=null", "rollout.engine={type: none, max_length: 32}", "replay.archive=all"]
HELD_OUT = ["prompts.eval_given={type: sort}", "prompts.eval_every=16", "trainer.checkpoint.keep_best=true"]
SMALL = ["gate.groups_per_step=8", "trainer.steps=60", "trainer.checkpoint.every=8", "trainer.norms_every=0"]


def test_given_answers_are_each_learned_once_though_rollouts_and_trainer_are_killed(tmp_path: Path) -> None:
    """Supervised fine-tuning without an engine and without rewards: nobody loads a model but the trainer."""
    run = Run(tmp_path, [*ALONE, *SMALL, *HELD_OUT, "rollout.count=2"], ROOT / "configs" / "sft.yaml")
    for step, name in ((4, "rollout-0"), (12, "trainer"), (24, "rollout-1")):
        run.wait_for_step(step)
        victim = run.actors().get(name)
        if victim:  # one that has ended by itself cannot be killed
            victim.kill()
            psutil.wait_procs([victim], 10)
    assert "reward-0" not in run.actors()
    summary = run.wait()
    check_promises(summary)
    assert summary["restarts"] >= 2 and summary["steps"] == 60 and summary["groups_trained"] == 60 * 8
    assert summary["generated_tokens"] == 0 and summary["reward_last"] is None
    steps = steps_of(run.folder)
    assert all(row["given_tokens"] == row["tokens"] > 0 for row in steps)
    of_policy = ("mismatch_kl", "lag/", "entropy", "clip", "response_tokens")
    assert not any(name.startswith(of_policy) for row in steps for name in row)
    first, last = (np.mean([row["given_nll"] for row in part]) for part in (steps[:5], steps[-5:]))
    assert last < 0.6 * first
    assert {row["finish"] for row in read_lines(run.folder / "samples.jsonl")} == {"given"}
    losses = [row for row in read_lines(run.folder / "metrics.jsonl") if row["kind"] == "eval_loss"]
    assert sorted({row["step"] for row in losses}) == [0, 16, 32, 48, 60] and len(losses) <= 7, "redone, it is the same"
    means = {int(step): sets["given"] for step, sets in summary["eval_losses"].items()}
    assert summary["eval_loss_before"]["given"] == means[0] > 2 * summary["eval_loss_after"]["given"]
    assert summary["eval_best"] == pytest.approx(min(means.values()), rel=1e-5)
    assert means[summary["eval_best_step"]] == min(means.values())
