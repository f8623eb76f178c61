"""Processes that are stopped for longer than anybody waits, and go on, or never do."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.harness import COMMON, SMALL
from tests.e2e.runs import Run, check_promises

FROZEN_S = 70.0


@pytest.mark.chaos
def test_a_run_that_is_frozen_for_a_while_goes_on_and_a_broker_that_never_does_is_replaced(tmp_path: Path) -> None:
    """As by `docker pause`, or a suspended job; and as in a write to a file system that is gone."""
    run = Run(tmp_path, [*COMMON, *SMALL, "trainer.steps=60"])
    run.wait_for_step(10)
    every = [psutil.Process(run.process.pid), *psutil.Process(run.process.pid).children(recursive=True)]
    for process in every:
        process.send_signal(signal.SIGSTOP)
    time.sleep(FROZEN_S)
    for process in every:
        process.send_signal(signal.SIGCONT)
    run.wait_for_step(30)
    actors = run.actors()
    assert actors["trainer"] in every and actors["broker"] in every, "nobody ended for its own absence"
    actors["broker"].send_signal(signal.SIGSTOP)
    summary = run.wait(300)
    check_promises(summary)
    assert summary["steps"] == 60 and summary["restarts"] >= 1
