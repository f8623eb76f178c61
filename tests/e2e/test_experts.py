"""A mixture of experts through the whole pipeline."""

from __future__ import annotations

from pathlib import Path

from penstock.pipeline.run.summary import steps_of
from tests.e2e.runs import SHORT, Run, check_promises


def test_the_trainer_sends_tokens_where_the_engine_has_sent_them(tmp_path: Path) -> None:
    run = Run(tmp_path, [*SHORT, "model.experts=4", "rollout.sampling.routing_replay=true", "trainer.steps=4"])
    check_promises(run.wait())
    steps = steps_of(run.folder)
    assert len(steps) == 4 and all("routing_other" in row for row in steps)
    # At lag 0 both compute with the same weights in fp32: a router that chose otherwise would be one that was misled.
    assert steps[0]["lag_max"] == 0 and steps[0]["routing_other"] == 0 and steps[0]["mismatch_kl_k3"] < 1e-6
