"""Whoever is lost to the broker is ended where it is the process that was heard, and not one that is still starting."""

from __future__ import annotations

import signal
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.pipeline.config import load
from penstock.pipeline.run import launcher, serve, supervisor
from penstock.pipeline.run.supervisor import Supervisor
from penstock.protocols.mailbox import DeadlineError
from penstock.protocols.messages import Message, StopRun
from penstock.services.runtime.actor import ActorContext


def test_no_child_takes_itself_for_a_rank_of_what_started_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubeflow's PyTorchJob says RANK and WORLD_SIZE to all that it starts."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    watched = Supervisor(3)
    program = "import os; print({'RANK', 'WORLD_SIZE'} & set(os.environ))"
    child = watched.start("trainer", [sys.executable, "-c", program], tmp_path / "stderr")
    assert child.process and child.process.wait(30) == 0
    assert (tmp_path / "stderr").read_text().strip() == "set()"


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
    killed = "trainer was killed by SIGKILL (by the system, perhaps, for want of memory: see dmesg)"
    assert (watched.poll() or watched.poll()) == f"{killed} after 0 restarts within a day (run.max_restarts); "
    watched.stop(1)


def test_the_last_words_of_who_says_very_much_take_no_memory(tmp_path: Path) -> None:
    stderr = tmp_path / "stderr"
    code = "import os; os.ftruncate(2, 64 << 20); os.lseek(2, 0, 2); os.write(2, b'\\nthe last of it\\n')"
    watched = Supervisor(0)
    child = watched.start("server", [sys.executable, "-c", code], stderr)
    assert child.process and child.process.wait(10) == 0 and stderr.stat().st_size > 64 << 20
    tracemalloc.start()
    assert child.last_words() == "the last of it"
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    watched.stop(1)


def test_the_terminal_says_who_was_started_again_and_what_it_died_of(tmp_path: Path) -> None:
    watched, notes = Supervisor(3), list[str]()
    code = "import sys; sys.stderr.write('trainer: the mistake\\nbye\\n'); sys.exit(3)"
    watched.start("trainer", [sys.executable, "-c", code], tmp_path / "stderr")
    launch: Any = launcher._Launch.__new__(launcher._Launch)
    launch._told, launch._supervisor, launch._programs = {}, watched, SimpleNamespace(children=[])
    until = time.monotonic() + 10
    while not notes and time.monotonic() < until:
        assert watched.poll() is None
        launch._note_restarts(SimpleNamespace(note=notes.append))
    watched.stop(1)
    assert notes == ["trainer died and was started again (1): it ended with exit code 3; trainer: the mistake"]


def test_deaths_of_yesterday_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LATELY_S", 1.0)
    watched = Supervisor(1)
    child = watched.start("trainer", [sys.executable, "-c", "raise SystemExit(1)"], tmp_path / "stderr")

    def dies() -> str | None:
        assert child.process
        child.process.wait(10)
        return watched.poll()

    def begins_again() -> None:
        until = time.monotonic() + 10
        while child.start_again_at is not None:
            assert watched.poll() is None and time.monotonic() < until

    try:
        for _ in range(3):
            assert dies() is None
            time.sleep(1.1)
            begins_again()
        monkeypatch.setattr(supervisor, "LATELY_S", 60.0)
        assert "ended with exit code 1 after 1 restarts within a day" in str(dies() or watched.poll())
    finally:
        watched.stop(1)


WAITING = "waiting for the last checkpoint"


@pytest.mark.parametrize(
    ("left", "away", "stopped_by", "said"),
    [
        ([["trainer"], ["trainer"], []], [], [], [WAITING] * 2),
        ([["trainer", "rollout-0"], ["rollout-0"]], [], [signal.SIGINT], [WAITING, "not drained"]),
        ([["rollout-0"]], [], [], ["not drained"]),
        ([["trainer"]] * 4, [], [], [WAITING] * 3 + ["not drained"]),
        ([["trainer"]] * 2, [], [signal.SIGTERM], [WAITING, "not drained"]),
        ([[], []], ["trainer", None], [], [WAITING]),
    ],
)
def test_a_checkpoint_is_waited_for_longer_than_anything_else(
    left: list[list[str]],
    away: list[str | None],
    stopped_by: list[signal.Signals],
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``left``: who has not ended, look by look; ``away``: a learner on another machine that has not left."""
    clock, notes, waits, members = iter(range(100)), list[str](), iter(left), iter(away)
    monkeypatch.setattr(launcher, "DRAIN_S", 0.5)
    monkeypatch.setattr(launcher, "CHECKPOINT_S", 3.5)
    monkeypatch.setattr(launcher, "TERM_S", 1.5)
    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    ended = list[str]()

    def state(_mailbox: Any) -> dict[str, Any]:
        name = next(members, None)
        return {"lost": {"rollout-9": 70.0}, "members": {name: {"kind": "trainer"}} if name else {}}

    monkeypatch.setattr(launcher.client, "state", state)
    launch: Any = launcher._Launch.__new__(launcher._Launch)
    launch._config, launch._mailbox, launch._interrupted = load(Path("configs/quickstart.yaml")), object(), stopped_by
    children = [SimpleNamespace(name=name) for name in ("broker", "redis", "trainer", "rollout-0")]
    launch._supervisor = SimpleNamespace(
        children=children, wait=lambda names, seconds: next(waits), end_wedged=lambda name, silent_s: ended.append(name)
    )
    launch._keep_books = lambda: None
    asked = list[Message]()
    launch._insist = asked.append
    launch._drain(SimpleNamespace(note=notes.append), SimpleNamespace(restarts=0), "no rollout", failed=True)
    assert asked == [StopRun(reason="no rollout", failed=True)], "once, and trackers hear of it"
    assert [note.split(" (")[0].split(" within")[0] for note in notes] == said
    assert next(waits, None) is None and set(ended) == {"rollout-9"}


LOST, GONE = {"lost": {"rollout-1": 300.0}, "phase": "training"}, {"lost": {}, "phase": "done"}


@pytest.mark.parametrize(
    ("answers", "ended", "outcome"),
    [
        ([LOST, 5.0, GONE], [("rollout-1", 300.0)], "complete"),
        ([5.0] * 8 + [GONE], [], "complete"),
        ([5.0] * 9 + [GONE], [("broker", 45.0)], "complete"),
        ([5.0] * 30, [("broker", 45.0)], "failed"),
        ([400.0] * 8 + [GONE], [], "complete"),  # it was stopped itself while it waited
    ],
)
def test_a_broker_that_says_nothing_for_long_is_ended_once(
    answers: list[Any], ended: list[tuple[str, float]], outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``answers``: to the launcher's questions, or after how many seconds it gave one up."""
    now, left, found = [0.0], iter(answers), list[tuple[str, float]]()
    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None))

    def state(_mailbox: Any) -> dict[str, Any]:
        answer = next(left)
        if isinstance(answer, float):
            now[0] += answer
            raise DeadlineError("StatusRequest: no answer")
        return dict(answer)

    monkeypatch.setattr(launcher.client, "state", state)
    launch: Any = launcher._Launch.__new__(launcher._Launch)
    launch._mailbox, launch._interrupted = SimpleNamespace(heard_at=-1.0), []
    end = lambda name, silent_s: found.append((name, silent_s))  # noqa: E731
    launch._supervisor = SimpleNamespace(poll=lambda: None, restarts=0, children=[], end_wedged=end)
    launch._programs = SimpleNamespace(poll=lambda: None, restarts=0, children=[])
    launch._check_disk = lambda: None
    shown = SimpleNamespace(update=lambda *_: None, note=lambda *_: None)
    assert launch._watch(shown)[1] == outcome and found == ended


@pytest.mark.parametrize(
    ("overrides", "reached", "bound"),
    [
        (["broker.bind=tcp://0.0.0.0:0"], "tcp://10.1.0.7:4321", "tcp://0.0.0.0:4321"),
        (["broker.bind=tcp://10.1.0.0/16:0"], "tcp://10.1.0.7:4321", "tcp://10.1.0.0/16:4321"),
        ([], "tcp://127.0.0.1:4321", "tcp://127.0.0.1:4321"),
        (["broker.bind=tcp://0.0.0.0:5555", "broker.advertise=tcp://a:1"], "tcp://a:1", "tcp://0.0.0.0:5555"),
    ],
)
def test_a_broker_that_is_started_again_listens_where_the_one_before_did(
    overrides: list[str], reached: str, bound: str
) -> None:
    launch: Any = launcher._Launch.__new__(launcher._Launch)
    launch._config = load(Path("configs/quickstart.yaml"), overrides)
    assert launch._bound(reached) == bound


def test_a_broker_has_keys_wherever_everybody_else_of_its_run_has_them(tmp_path: Path) -> None:
    context = ActorContext("broker", "run", tmp_path, "")
    for bind, has_keys in (("127.0.0.1", False), ("0.0.0.0", True), ("127.0.0.1", True)):
        config = load(Path("configs/quickstart.yaml"), [f"broker.bind=tcp://{bind}:0"])
        assert bool(serve._broker_settings(config, context).keys) == has_keys == (tmp_path / "keys").exists()
