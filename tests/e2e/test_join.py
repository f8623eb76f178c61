"""Another machine's processes join a run by its folder: `run.elsewhere`, and `penstock join`."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from penstock.pipeline.run.launcher import RunError
from tests import warm
from tests.e2e.runs import ROOT, SHORT, STARTED, Run, check_promises


def join(folder: Path, log: Path, *more: str) -> warm.Process:
    with log.open("wb") as out:
        process = warm.start("join", str(folder), *more, output=out)
    STARTED.append(process)
    return process


def until(there: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.1)


@pytest.mark.slow
def test_rollouts_come_and_go_and_the_run_does_not_mind(tmp_path: Path) -> None:
    run = Run(tmp_path, [*SHORT, "run.elsewhere=[rollout]", "broker.bind=tcp://127.0.0.0/8:0", "trainer.steps=150"])
    until(lambda: (run.folder / "config.yaml").is_file(), "the run's folder")
    first = join(run.folder, tmp_path / "first", "--name", "one", "trainer.threads=1")  # before there is a broker
    run.wait_for_step(3)
    assert "rollout-one-0" in run.actors() and "rollout-0" not in run.actors()
    run.actors()["rollout-one-0"].kill()
    until(lambda: "was started again" in (tmp_path / "first").read_text(), "the rollout's return")
    second = join(run.folder, tmp_path / "second", "rollout", "--count", "2", "--name", "two")
    until(lambda: "rollout-two-1" in run.actors(), "two more")
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 130
    assert "told to leave: rollout-one-0 left the run" in (tmp_path / "first").read_text()
    summary = run.wait()
    check_promises(summary)
    assert summary["steps"] == 150
    assert second.wait(60) == 0 and "the run is complete: 150 steps" in (tmp_path / "second").read_text()
    late = join(run.folder, tmp_path / "late")
    assert late.wait(60) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nowhere"], 2, "RUN: nowhere is not a run's folder"),
        (["{folder}", "nobody"], 2, "ACTOR: 'nobody' is not one of trainer, rollout"),
        (["{folder}", "critic"], 2, "ACTOR: this run needs no critic"),
        (["{folder}", "--patience", "1"], 75, "none has listened; start the run"),
    ],
)
def test_what_cannot_be_joined_is_told(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    (tmp_path / "config.yaml").write_text((ROOT / "configs" / "quickstart.yaml").read_text())
    given = [argument.format(folder=tmp_path) for argument in arguments]
    done = warm.run("join", *given)
    assert done.returncode == code and said in done.stderr, done.stderr
    assert RunError.__name__ not in done.stderr


@pytest.mark.chaos
def test_a_trainers_ranks_come_from_two_machines_and_one_of_them_dies(tmp_path: Path) -> None:
    more = ["run.elsewhere=[trainer]", "broker.bind=tcp://127.0.0.0/8:0", "trainer.ranks=2", "trainer.nodes=2"]
    run = Run(tmp_path, [*SHORT, *more, "trainer.steps=60", "trainer.checkpoint.every=5"])
    until(lambda: (run.folder / "config.yaml").is_file(), "the run's folder")
    joined = {name: join(run.folder, tmp_path / name, "trainer", "--name", name) for name in ("one", "two")}
    for turn, name in enumerate(("two", "one"), 1):  # of both, one is where they meet
        run.wait_for_step(15 * turn)
        victim, other = joined.pop(name), next(iter(joined))
        for process in [psutil.Process(victim.pid), *psutil.Process(victim.pid).children(recursive=True)]:
            process.kill()
        until(lambda other=other: "was started again" in (tmp_path / other).read_text(), f"{other} to notice")  # type: ignore[misc]
        assert victim.wait(10) == -signal.SIGKILL
        if turn == 1:  # longer than a process may be silent: who waits for another machine does not hang
            time.sleep(50)
            assert (tmp_path / other).read_text().count("was started again") == 1
        again = f"{name}-again"  # on another machine, say
        joined[again] = join(run.folder, tmp_path / again, "trainer", "--name", again)
    summary = run.wait()
    check_promises(summary)
    assert summary["steps"] == 60
    assert [process.wait(60) for process in joined.values()] == [0, 0]
