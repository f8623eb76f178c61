"""Runs in which answers are given, by the real command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil

from penstock.pipeline.run.summary import read_lines, steps_of
from tests.e2e.runs import ROOT, Run, check_promises

ALONE = ["prompts.eval=null", "rollout.engine={type: none, max_length: 32}", "replay.archive=all"]
SMALL = ["gate.groups_per_step=8", "trainer.steps=60", "trainer.checkpoint.every=8", "trainer.norms_every=0"]


def test_given_answers_are_each_learned_once_though_rollouts_and_trainer_are_killed(tmp_path: Path) -> None:
    """Supervised fine-tuning without an engine and without rewards: nobody loads a model but the trainer."""
    run = Run(tmp_path, [*ALONE, *SMALL, "rollout.count=2"], ROOT / "configs" / "sft.yaml")
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
