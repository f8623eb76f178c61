"""Programs of others beside a run: real processes, waited for, watched and ended."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from penstock.pipeline.config import Config, ConfigError
from penstock.pipeline.launch.parts import parts_of
from penstock.pipeline.preflight.look import look
from penstock.pipeline.resources.gpus import total_gpus
from penstock.pipeline.run import programs as running
from penstock.pipeline.run.answering import lacks
from penstock.pipeline.run.programs import of_their_own, started
from penstock.services.runtime.device_turn import TURNS, LearnersTurn, devices_here
from penstock.services.runtime.gpus import VISIBLE
from penstock.services.runtime.sleepers import Caller, NoCalls
from tests.e2e.runs import free_port

SERVER = """
import http.server, os, subprocess, sys
print("starting", file=sys.stderr, flush=True)
beside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("told", "w").write(f"{os.environ['OWN']} {os.environ['CUDA_VISIBLE_DEVICES']} {beside.pid}")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def config(**programs: dict[str, Any]) -> Config:
    return Config.model_validate(
        {"model": {"type": "tiny"}, "prompts": {"train": {"type": "sort"}}, "programs": programs}
    )


SLEEPS = {
    "ready": "tcp://127.0.0.1:1", "sleep": "http://127.0.0.1:1/sleep", "wake": "http://127.0.0.1:1/wake_up",
}  # fmt: skip


def colocated(ranks: int, **programs: dict[str, Any]) -> Config:
    given = config(**programs).model_dump(exclude_unset=True)
    return Config.model_validate({**given, "run": {"placement": "colocated"}, "trainer": {"ranks": ranks}})


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def said() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_a_program_is_ready_watched_and_ended_with_all_that_it_started(
    tmp_path: Path, said: Console, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.py").write_text(SERVER)
    port = free_port()
    judge = {"command": f"python server.py {port}", "ready": f"http://127.0.0.1:{port}/", "env": {"OWN": "mine"}}
    with started(config(judge=judge), tmp_path / "run", said) as programs:
        told = capsys.readouterr()
        assert "waiting for programs.judge (http://127.0.0.1:" in told.err and not told.out, (
            "which has a dry run's YAML"
        )
        own, gpus, beside = (tmp_path / "told").read_text().split(" ")
        assert (own, gpus) == ("mine", "") and psutil.pid_exists(int(beside))
        log = tmp_path / "run" / "logs" / "program-judge.stderr"
        assert log.read_text().startswith("starting")
        with pytest.raises(ConfigError, match=r"programs.judge.ready: http.* answers before the program is started"):
            monkeypatch.setattr(running, "LEAVE_S", 0.0)
            with started(config(judge=judge), tmp_path / "other", said):
                pass
        guard = programs.children[0].process
        assert guard and programs.poll() is None
        os.killpg(psutil.Process(guard.pid).children()[0].pid, signal.SIGKILL)
        until(lambda: bool(programs.poll() or programs.restarts))
        until(lambda: log.read_text().count("starting") == 2)
        until(lambda: not psutil.pid_exists(int(beside)))
        until(lambda: not lacks(judge["ready"]))  # type: ignore[arg-type]
        again = int((tmp_path / "told").read_text().split(" ")[2])
    assert "does not answer" in lacks(judge["ready"])  # type: ignore[arg-type]
    until(lambda: not psutil.pid_exists(again))


def test_one_that_is_not_ready_says_why(tmp_path: Path, said: Console) -> None:
    port = free_port()
    tcp, web = f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{port}/nothere"
    loading = ["python", "-c", "import time; print('loading', flush=True); time.sleep(60)"]
    told: dict[str, tuple[Any, str | None, str]] = {
        "gone": (
            ["python", "-c", "import sys; sys.exit('no model here')"],
            tcp,
            "with exit code 1 .*: no model here; all",
        ),
        "nowhere": ("no-such-program --port 1", tcp, "with exit code 127 .*no-such-program: No such file or directory"),
        "late": (loading, tcp, "does not answer .*, 1 s after the program was started .*loading"),
        "wrong": (["python", "-m", "http.server", str(port)], web, r"answers 404 \(File not found\), 3 s after"),
        "beside": ("no-such-program", None, "ended with exit code 127 before the run could begin"),
    }
    for name, (command, ready, why) in told.items():
        program = {"command": command, "ready": ready, "ready_s": {"late": 1.0, "wrong": 3.0}.get(name, 30.0)}
        slow = {"slow": {"command": loading, "ready": tcp}} if name == "beside" else {}
        with pytest.raises(ConfigError, match=rf"programs\.{name}.*{why}") as error:  # noqa: SIM117
            with started(config(**slow, **{name: program}), tmp_path / "run", said):
                pass
        assert (tmp_path / "run" / "logs" / f"program-{name}.stderr").is_file() and "program-" in str(error.value)
    assert not [child for child in psutil.Process().children() if "-c" in child.cmdline()]


def failing(response: str) -> float:
    """A reward that asks a program."""
    raise ConnectionError("no judge here")


def test_where_they_are_not_started_nobody_asks_them(tmp_path: Path) -> None:
    asking = config(judge={"command": "judge"}).model_dump()
    asking["reward"] = {"functions": [{"function": "tests.pipeline.test_programs:failing"}]}
    told = Config.model_validate(asking)
    report = look(told, tmp_path)
    assert (
        look(told, tmp_path, lacking="no GPU").here[0].startswith("no GPU; they are not started, so no reward function")
    )
    asleep = colocated(1, judge={"command": "judge", **SLEEPS})
    assert "started one by one nobody does, so that nobody would ask it" in "".join(look(asleep, tmp_path).problems)
    assert not report.problems and report.notes[0].startswith("programs.judge: not started here, so no reward function")
    assert "no judge here" in "".join(look(told, tmp_path, programs=True).problems)


def test_one_that_dies_again_and_again_ends_the_run(tmp_path: Path, said: Console) -> None:
    short = config(frail={"command": [sys.executable, "-c", "raise SystemExit('out of memory')"]})
    short = short.model_copy(update={"run": short.run.model_copy(update={"max_restarts": 1})})
    with started(short, tmp_path / "run", said) as programs:
        found: list[str] = []
        until(lambda: bool((error := programs.poll()) and found.append(error) is None))
    assert found[0].startswith("programs.frail ended with exit code 1 after 1 restarts") and "out of memory" in found[0]


def test_one_that_does_not_sleep_is_told_before_anything_begins(tmp_path: Path, said: Console) -> None:
    port = free_port()
    judge = {"command": ["python", "-m", "http.server", str(port)], "ready": f"http://127.0.0.1:{port}/"}
    sleeps = {"sleep": f"http://127.0.0.1:{port}/sleep", "wake": f"http://127.0.0.1:{port}/wake_up"}
    with started(config(judge={**judge, **sleeps}), tmp_path / "apart", said):
        pass  # where nobody takes turns nobody has it sleep
    with pytest.raises(ConfigError, match=r"programs.judge.sleep: http.*/sleep answers 501 .*VLLM_SERVER_DEV_MODE"):  # noqa: SIM117
        with started(colocated(1, judge={**judge, **sleeps}), tmp_path / "run", said):
            pass


def test_a_start_is_interrupted_while_one_does_not_fall_asleep(
    tmp_path: Path, said: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that answers the first time, and never again; and one that says why it cannot."""
    monkeypatch.chdir(tmp_path)
    slow = SLEEPER.replace(
        "self.answer(500 if", "self.path == '/sleep' and asked and time.sleep(60); self.answer(500 if"
    )
    (tmp_path / "sleeper.py").write_text(slow.replace("import http", "import time, http"))
    url = f"http://127.0.0.1:{(port := free_port())}"
    judge = {
        "command": f"python sleeper.py {port}", "ready": f"{url}/", "sleep": f"{url}/sleep", "wake": f"{url}/wake_up"
    }  # fmt: skip
    told: list[float] = []

    def interrupt() -> None:
        told.append(time.monotonic())
        if told[-1] - told[0] > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), started(colocated(1, judge=judge), tmp_path, said) as programs:
        programs.rest(tmp_path, interrupt)
    assert time.monotonic() - told[-1] < 8 and not programs.children[0].alive
    (tmp_path / "sleeper.py").write_text(SLEEPER.replace("len(asked) == 3", "len(asked) == 1"))
    with pytest.raises(ConfigError, match=r"programs.judge.wake: .* answers 500 .*; its last words: /wake_up;"):  # noqa: SIM117
        with started(colocated(1, judge=judge), tmp_path, said):
            pass


SLEEPER = """
import http.server, sys, threading
class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.answer(200)
    def do_POST(self):
        print(self.path, file=sys.stderr, flush=True)
        self.answer(500 if self.path == "/wake_up" and len(asked) == 3 else 200)
        asked.append(self.path)
    def answer(self, status):
        self.send_response(status); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
asked = []
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Server).serve_forever()
"""


def test_one_that_does_not_wake_is_started_again(
    tmp_path: Path, said: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor waits until its devices are not a learner's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    url = f"http://127.0.0.1:{(port := free_port())}"
    judge = {
        "command": f"python sleeper.py {port}", "ready": f"{url}/", "sleep": f"{url}/sleep", "wake": f"{url}/wake_up"
    }  # fmt: skip
    trainer = LearnersTurn(tmp_path / TURNS, devices_here("cpu")[0], "trainer", 20)
    trainer.take()
    with started(colocated(1, judge=judge), tmp_path, said) as programs:
        log = tmp_path / "logs" / "program-judge.stderr"
        assert programs.rest(tmp_path, lambda: None) is None
        assert log.read_text().split() == ["/sleep", "/wake_up", "/sleep"]
        time.sleep(0.5)
        trainer.give()
        until(lambda: bool(programs.poll() or programs.restarts))
        caller = Caller(tmp_path, ("judge",), "reward-0", NoCalls())
        until(caller.poll)
        assert log.read_text().split() == ["/sleep", "/wake_up", "/sleep", "/wake_up"], "one that begins is awake"
        trainer.queue()
        trainer.take(lambda: bool(caller.poll()) and None)
        child = programs.children[0]
        assert child.process and log.read_text().split()[-1] == "/sleep" and not caller.poll()
        os.kill(psutil.Process(child.process.pid).children()[0].pid, signal.SIGKILL)
        until(lambda: not child.alive)
        for _ in range(20):
            programs.poll()
            time.sleep(0.05)
        assert programs.restarts == 1, "it waits for its devices"
        trainer.give()
        until(lambda: bool(programs.poll() or programs.restarts == 2))
        until(caller.poll)


def test_their_gpus_are_theirs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "0,1,2,3")
    monkeypatch.setattr(running, "visible_gpus", lambda: os.environ[VISIBLE].split(","))
    both = config(
        judge={"command": "judge", "gpus": 2}, search={"command": "search", "gpus": 1}, plain={"command": "x"}
    )
    with of_their_own(both) as gpus:
        assert gpus == {"judge": "2,3", "search": "1"} and os.environ[VISIBLE] == "0"
    assert os.environ[VISIBLE] == "0,1,2,3"
    alone = total_gpus(config())
    assert total_gpus(both) == alone + 3 and parts_of(both, with_gpus=True)[0].gpus == alone + 3
    asleep = {"judge": {"command": "judge", "gpus": 2, **SLEEPS}, "search": {"command": "search", "gpus": 1}}
    shared = colocated(2, **asleep)
    with of_their_own(shared) as gpus:
        assert gpus == {"search": "3", "judge": "1,0"} and os.environ[VISIBLE] == "0,1,2"
    assert total_gpus(shared) == 3 and total_gpus(config(**asleep)) == alone + 3, "of its own where nobody takes turns"
    assert (
        "programs.judge.gpus=2: with sleep they are the trainer's (run.placement=colocated), which has 1 here "
        "(trainer.ranks=1); use fewer"
    ) in running.too_few_gpus(colocated(1, **asleep))
    many = config(judge={"command": "judge", "gpus": 4})
    assert (
        "they want 4 GPUs of their own (judge 4) beside those of the run, and this machine has 4"
        in running.too_few_gpus(many)
    )
    with of_their_own(many) as gpus:
        assert not gpus and os.environ[VISIBLE] == "0,1,2,3"


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ({"command": "  "}, "no program is named"),
        ({"command": 'judge "'}, "cannot be split into words: No closing quotation"),
        ({"command": "serve && echo"}, r"'&&' is for a shell, and there is none: give \[bash, -c, \"serve && echo\"\]"),
        ({"command": "PORT=1 serve"}, "'PORT=' is for a shell"),
        ({"command": "x", "ready": "127.0.0.1:80"}, "cannot be asked; give e.g. http://127.0.0.1:8431/health"),
        ({"command": "x", "ready": "tcp://127.0.0.1"}, "cannot be asked"),
        ({"command": "x", "ready": "http://127.0.0.1:99999"}, "cannot be asked"),
        ({"command": "x", "sleep": "http://127.0.0.1:80/sleep"}, "sleep and no wake: one that sleeps has to wake"),
        ({"command": "x", **SLEEPS, "wake": "tcp://127.0.0.1:80"}, "cannot be posted to; give e.g. http://"),
        ({"command": "x", **SLEEPS, "ready": None}, "sleep and no ready: it says when"),
        ({"command": "play RUN", **SLEEPS, "ready": None}, "never sleeps; leave sleep and wake out"),
        ({"command": "play RUN", "ready": "tcp://127.0.0.1:80"}, r"told of the run \(RUN\) is started behind all else"),
    ],
)
def test_what_cannot_be_started_or_asked_is_refused(program: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        config(judge=program)
