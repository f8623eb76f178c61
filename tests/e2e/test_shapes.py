"""A whole run whose trainer has a shape, loses a rank, and goes on in another shape."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import SHORT, Run, check_promises


def kill_rank(run: Run, rank: str) -> None:
    """With -9."""
    every = [p for p in psutil.process_iter(["cmdline"]) if str(run.folder) in (p.info["cmdline"] or [])]
    (victim,) = [p for p in every if p.environ().get("RANK") == rank]
    victim.kill()


@pytest.mark.chaos
def test_a_killed_rank_is_redone_and_a_resumed_run_may_have_another_shape(tmp_path: Path) -> None:
    shape = ["trainer.ranks=2", "trainer.tensor_parallel=2"]
    run = Run(tmp_path, [*SHORT, *shape, "trainer.steps=40", "trainer.checkpoint.every=5"])
    run.wait_for_step(8)
    kill_rank(run, "1")
    run.wait_for_step(20)
    run.process.send_signal(signal.SIGINT)
    stopped = run.wait(120, code=130)
    check_promises(stopped, "interrupted")
    assert stopped["restarts"] >= 1
    again = Run.resumed(run, ["trainer.tensor_parallel=1", "trainer.pipeline_parallel=2"])
    again.wait_for_step(28)
    kill_rank(again, "1")
    summary = again.wait(300)
    check_promises(summary)
    assert summary["steps"] == 40 and summary["restarts"] >= 1
