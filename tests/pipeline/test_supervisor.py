"""Whoever is lost to the broker is ended where it is the process that was heard, and not one that is still starting."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from penstock.pipeline.run import supervisor
from penstock.pipeline.run.supervisor import Supervisor


def test_a_process_that_starts_slowly_is_not_wedged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "WEDGED_S", 0.2)
    watched = Supervisor(3)
    child = watched.start("rollout-0", [sys.executable, "-c", "import sys; sys.stdin.read()"], tmp_path / "stderr")
    try:
        watched.end_wedged("rollout-0", 0.0)
        assert child.alive, "it is too young"
        time.sleep(0.3)
        watched.end_wedged("rollout-0", 60.0)
        assert child.alive, "who was heard a minute ago was another"
        watched.end_wedged("rollout-1", 0.1)
        assert child.alive
        watched.end_wedged("rollout-0", 0.1)
        assert child.process and child.process.wait(5) == -9, "it was heard, and is silent"
    finally:
        watched.stop(1)


def test_why_it_died_is_said_in_its_own_words_alone(tmp_path: Path) -> None:
    stderr = tmp_path / "stderr"
    stderr.write_text("trainer: what it died of last week\n")
    watched = Supervisor(0)
    child = watched.start("trainer", [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], stderr)
    assert child.process and child.process.wait(10) == -9
    assert child.last_words() == ""
    assert (watched.poll() or watched.poll()) == "trainer was killed by SIGKILL after 0 restarts (run.max_restarts); "
    watched.stop(1)
