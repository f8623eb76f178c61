"""The fork server: what it starts is what would have been started, and its own death costs nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.pipeline.run.command import penstock
from penstock.pipeline.run.forking import Forked, ForkError, ForkServer
from penstock.pipeline.run.supervisor import Supervisor


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path_factory.mktemp("forks") / "forkserver.stderr")
    yield server
    server.close()


def wait(supervisor: Supervisor, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while any(child.alive for child in supervisor.children):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["no-such-command"], 2)])
def test_a_forked_command_says_and_returns_what_a_started_one_does(
    server: ForkServer, tmp_path: Path, arguments: list[str], code: int
) -> None:
    said = {}
    for name, forks in (("forked", server), ("started", None)):
        supervisor = Supervisor(0, forks)
        child = supervisor.start(name, penstock(*arguments), tmp_path / name, restartable=False, preloaded=True)
        wait(supervisor)
        assert child.process and child.process.returncode == code
        said[name] = (tmp_path / name).read_text()
    assert said["forked"] == said["started"] and said["started"]


def waiting(folder: Path) -> list[str]:
    """An actor whose broker never answers: it goes on for a minute, and watches its stdin."""
    config = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    command = ["serve", "reward", "--config", str(config), "--folder", str(folder), "--name", "reward-0"]
    return penstock(*command, "--broker", "tcp://127.0.0.1:9", "--supervised")


def started_again(supervisor: Supervisor, seconds: float = 20) -> None:
    before, deadline = supervisor.restarts, time.monotonic() + seconds
    while supervisor.restarts == before:
        assert supervisor.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_process_is_seen_and_forked_again(server: ForkServer, tmp_path: Path) -> None:
    supervisor = Supervisor(3, server)
    child = supervisor.start("reward-0", waiting(tmp_path), tmp_path / "stderr", preloaded=True)
    first = psutil.Process(child.process.pid) if child.process else None
    assert first and first.ppid() == server.pid
    deadline = time.monotonic() + 20
    while str(tmp_path) not in first.cmdline():  # what `ps` shows
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert os.getsid(first.pid) == first.pid, "Ctrl-C is the supervisor's to handle"
    first.kill()
    started_again(supervisor)
    assert isinstance(child.process, Forked) and child.process.pid != first.pid and child.alive
    assert child.failures == 1
    child.process.kill()
    assert child.process.wait(30) == -signal.SIGKILL


def test_its_own_death_costs_nobody_else(tmp_path: Path) -> None:
    server = ForkServer(tmp_path / "forkserver.stderr")
    supervisor = Supervisor(3, server)
    child = supervisor.start("reward-0", waiting(tmp_path), tmp_path / "stderr", preloaded=True)
    assert isinstance(child.process, Forked)
    os.kill(server.pid, signal.SIGKILL)
    time.sleep(0.5)
    assert child.alive and supervisor.poll() is None, "what it has forked goes on"
    child.process.kill()
    started_again(supervisor)
    assert isinstance(child.process, subprocess.Popen), "what dies later loads for itself"
    with pytest.raises(ForkError), (tmp_path / "stderr").open("ab") as stderr:
        server.fork(child.command, child.env, stderr, with_parent=False)
    assert supervisor.stop(30) == []


def test_it_ends_with_its_supervisor(tmp_path: Path) -> None:
    code = f"""
import pathlib, time
from penstock.pipeline.run.forking import ForkServer
print(ForkServer(pathlib.Path({str(tmp_path / "stderr")!r})).pid, flush=True)
time.sleep(60)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert owner.stdout
    server = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    _, alive = psutil.wait_procs([server], 30)
    assert not alive
