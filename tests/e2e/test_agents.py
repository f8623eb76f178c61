"""Agents from outside through the whole pipeline: what they were served is what is trained on, whoever is killed."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import penstock
from penstock.pipeline.run.summary import steps_of
from penstock.protocols.agent_client import AgentRefusedError, AgentSession, Reply
from penstock.services.broker import archive
from tests.e2e.runs import ROOT, Run, check_promises

CONFIG = ROOT / "configs" / "agent.yaml"
TINY = [
    "trainer.steps=6", "gate.groups_per_step=4", "gate.window=1", "gate.prefetch=8", "prompts.eval=null",
    "model.warm_start.steps=2", "model.warm_start.batch=16", "rollout.sampling.n=4", "replay.archive=all",
    "gateway.http=127.0.0.1:0", "gateway.bind=tcp://127.0.0.1:0", "rollout.count=2",
]  # fmt: skip
TOOL: Any = {"type": "function", "function": {"name": "reveal", "parameters": {"type": "object"}}}


def worth(reply: Reply) -> float:
    """What its agent says."""
    return float(len(reply.tokens) % 2)


def play(session: AgentSession) -> list[Reply]:
    """Two turns, the second of which sometimes begins anew. The first is rewarded by itself."""
    asked = [{"role": "user", "content": session.task.text}]
    first = session.chat(asked, [TOOL])
    session.reward(-9.0)
    session.reward(worth(first) / 2, turn=first.turn)
    result = {"role": "tool", "tool_call_id": first.calls[0][2], "content": session.task.text}
    then = [*asked, first.message, result] if len(session.task.truth) % 3 else [{"role": "user", "content": "sort ba="}]
    return [first, session.chat(then, [TOOL])]


class Agents:
    """So many at once, each with a line of its own, until the run is over."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self.heard: dict[str, list[Reply]] = {}
        """By session, of those that were finished."""
        self.lost = 0
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        try:
            with penstock.AgentClient(self._folder) as client:
                while True:
                    self._play(client)
        except penstock.RunOver:
            pass
        except BaseException as error:
            self._errors.append(error)

    def _play(self, client: penstock.AgentClient) -> None:
        try:
            with client.session(wait_s=120) as session:
                replies = play(session)
                session.finish(reward=worth(replies[1]))
                self.heard[session.id] = replies
        except AgentRefusedError as refused:  # its gateway or its group has gone: the next one, please
            if refused.code not in ("session_lost", "unknown_session", "no_session", "broker_away"):
                raise
            self.lost += refused.code in ("session_lost", "unknown_session")

    def join(self, seconds: float) -> None:
        """Until all of them have heard that the run is over."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not self._errors, self._errors
        assert not any(thread.is_alive() for thread in self._threads), "an agent waits for a run that is over"


def pieces(tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray) -> Counter[tuple[int, float, int]]:
    return Counter(zip(tokens.tolist(), logprobs.tolist(), versions.tolist(), strict=True))


def check_tokens(run: Run, heard: dict[str, list[Reply]], all_heard: bool) -> None:
    """Each token that was trained on was served, as often, with its log-probability and version; and what a session
    has heard is trained on, where its group is."""
    trained: Counter[Any] = Counter()
    groups = set()
    for batch, _ in archive.read(run.folder, 0):
        for taken in batch.groups:
            groups.add(taken.number)
            for t in archive.open_group(taken).trajectories:
                on = t.loss_mask == 1
                trained += pieces(t.tokens[on], t.logprobs[on], t.versions[on])
    served: Counter[Any] = Counter()
    due: Counter[Any] = Counter()
    for session, replies in heard.items():
        for reply in replies:
            found = pieces(reply.tokens, reply.logprobs.clip(max=0), reply.versions)
            served += found
            if int(session.split("-")[1]) in groups:
                due += found
    lost = due - trained
    assert not lost, lost
    missing = trained - served
    if all_heard:
        assert not missing, missing
    assert sum(trained.values()) > 100


def rewarded(run: Run) -> dict[tuple[int, int], list[list[float]]]:
    """By group and place: of each branch of what was trained on, the rewards of its turns."""
    found: dict[tuple[int, int], list[list[float]]] = {}
    for batch, _ in archive.read(run.folder, 0):
        for taken in batch.groups:
            trajectories = archive.open_group(taken).trajectories
            ends = np.cumsum([len(t.tokens) for t in trajectories])
            for t, values in zip(trajectories, np.split(taken.columns["reward/environment"], ends[:-1]), strict=True):
                last = np.diff([*t.loss_mask.astype(int), 0]) == -1
                assert not values[~last].any(), "rewards lie where turns end"
                found.setdefault((taken.number, t.session), []).append(values[last].tolist())
    return found


def place_of(session: str) -> tuple[int, int]:
    """Its group, and where in it."""
    _, number, place, _ = session.split("-")
    return int(number), int(place)


def check_rewards(run: Run, heard: dict[str, list[Reply]]) -> None:
    """What agents have said is in the column: a session's sum in each of its branches, a turn's where it ends."""
    found, checked = rewarded(run), 0
    for session, (first, second) in heard.items():
        branches = found.get(place_of(session), [])  # none: its group was not trained on
        turns = [worth(first) / 2, worth(second)]
        assert branches in ([], [turns], [[sum(turns)], [sum(turns)]]), (session, branches, turns)
        checked += bool(branches)
    assert checked > 50


def test_agents_are_trained_on_what_they_were_served(tmp_path: Path) -> None:
    run = Run(tmp_path, TINY, CONFIG)
    agents = Agents(run.folder, 8)
    summary = run.wait(240)
    agents.join(60)
    check_promises(summary)
    assert summary["steps"] == 6 and summary["groups_trained"] == 24
    assert summary["groups_finished_logged"] >= 24, "the audit compares with what gateways have finished"
    assert all(row["turns"] >= 1 for row in steps_of(run.folder))
    check_tokens(run, agents.heard, all_heard=True)
    check_rewards(run, agents.heard)


def test_a_run_plays_with_agents_that_it_starts_itself(tmp_path: Path) -> None:
    """One that dies is started again."""
    command = ["penstock", "play", "RUN", "tests.players.envs:Endless", "-o", "max_turns=2", "--sessions", "8"]
    programs = f"programs={json.dumps({'players': {'command': command}})}"
    run = Run(tmp_path, [*TINY, "trainer.steps=3", "gateway.lost_s=4", programs], CONFIG)
    run.wait_for_step(0)
    assert "which you start beside it" not in run.output.read_text()
    play = [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [])[2:4] == ["play", str(run.folder)]]
    play[0].kill()
    summary = run.wait(240)
    check_promises(summary)
    assert summary["steps"] == 3 and summary["restarts"] >= 1
    assert "programs.players died and was started again" in run.output.read_text()
    assert "played" in (run.folder / "logs" / "program-players.stderr").read_text()


def free_ports() -> list[str]:
    """Overrides: a gateway that is started again must be where it was."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = one.getsockname()[1], other.getsockname()[1]
    return [f"gateway.http=127.0.0.1:{ports[0]}", f"gateway.bind=tcp://127.0.0.1:{ports[1]}"]


@pytest.mark.chaos
def test_killed_processes_cost_agents_time_alone(tmp_path: Path) -> None:
    """Agents go on with the session that they have, whoever dies under them; no token is trained on twice."""
    run = Run(tmp_path, [*TINY, *free_ports(), "trainer.steps=40", "run.max_restarts=20", "gateway.lost_s=8"], CONFIG)
    agents = Agents(run.folder, 8)

    run.wait_for_step(2)
    for victim in ("gateway-0", "rollout-0", "trainer", "gateway-0", "rollout-1", "reward-0"):
        if victim in run.actors():
            run.actors()[victim].kill()
        time.sleep(4)
    summary = run.wait(240)
    agents.join(60)
    check_promises(summary)
    assert summary["steps"] == 40 and summary["restarts"] >= 4
    assert agents.lost <= 8, "a session that was open is gone on with"
    check_tokens(run, agents.heard, all_heard=False)
    check_rewards(run, agents.heard)


@pytest.mark.chaos
def test_the_only_agent_goes_on_with_its_session_when_its_gateway_has_died(tmp_path: Path) -> None:
    """Also where it thinks for longer than a new gateway waits for what it does not know. What it has said of a turn is
    not lost."""
    run = Run(tmp_path, [*TINY, *free_ports()], CONFIG)
    with penstock.AgentClient(run.folder) as client, client.session(wait_s=120) as session:
        asked = [{"role": "user", "content": session.task.text}]
        first = session.chat(asked)
        session.reward(0.25, turn=first.turn)
        run.actors()["gateway-0"].kill()
        time.sleep(25)  # SETTLING_S, and what it takes to start
        second = session.chat([*asked, first.message, {"role": "user", "content": "ba="}])
        assert second.turn == first.turn + 1
        session.finish(reward=1.0)
    agents = Agents(run.folder, 8)  # they play the rest
    run.wait(240)
    agents.join(60)
    assert rewarded(run)[place_of(session.id)] == [[0.25, 1.0]]


def another_client(folder: Path) -> subprocess.Popen[bytes]:
    """A process of its own, with eight agents, to be killed."""
    program = (
        "import sys; from pathlib import Path; from tests.e2e.test_agents import Agents; "
        "Agents(Path(sys.argv[1]), 8).join(600)"
    )
    return subprocess.Popen([sys.executable, "-c", program, str(folder)], cwd=ROOT)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_broker_store_and_clients_killed_in_the_middle_of_turns(tmp_path: Path) -> None:
    """Whoever is left finishes; what dead clients had is given again; no token is trained on twice, none past the
    bound."""
    more = ["trainer.steps=60", "run.max_restarts=40", "gateway.lost_s=6", "gateway.attempts=20"]
    run = Run(tmp_path, [*TINY, *free_ports(), *more], CONFIG)
    agents, clients = Agents(run.folder, 8), [another_client(run.folder) for _ in range(2)]
    run.wait_for_step(2)
    killed = 0
    for victim in (
        "client",
        "redis",
        "gateway-0",
        "broker",
        "client",
        "rollout-0",
        "redis",
        "broker",
        "client",
        "trainer",
    ):
        if victim == "client":
            clients.pop(0).kill()
            clients.append(another_client(run.folder))
            killed += 1
        elif process := run.actors().get(victim):
            process.kill()
            killed += 1
        time.sleep(5)
    assert killed >= 8, "the run was over too soon"
    summary = run.wait(500)
    agents.join(60)
    for client in clients:
        assert client.wait(60) == 0
    check_promises(summary)
    assert summary["steps"] == 60 and summary["lag_max_seen"] <= 3
    check_tokens(run, agents.heard, all_heard=False)
    check_rewards(run, agents.heard)


@pytest.mark.learning
@pytest.mark.timeout(1800)
def test_twelve_clients_and_frameworks_in_one_run_are_all_trained(tmp_path: Path) -> None:
    parser = "gateway.tool_calls=examples.agent_frameworks:two_calls"
    run = Run(tmp_path, [*free_ports(), parser, "trainer.steps=120"], CONFIG)
    said = tmp_path / "rewards.jsonl"
    agents = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "agent_frameworks.py"), str(run.folder), str(said)]
    )
    summary = run.wait(1700)
    check_promises(summary)
    assert agents.wait(60) == 0
    rewards: dict[str, list[float]] = {}
    for line in said.read_text().splitlines():
        row = json.loads(line)
        rewards.setdefault(row["client"], []).append(row["reward"])
    assert len(rewards) == 12
    for client, course in rewards.items():
        assert np.mean(course[:40]) < 0.4 and np.mean(course[-80:]) > 0.85, client


@pytest.mark.learning
@pytest.mark.timeout(1800)
def test_an_agent_in_openais_client_is_trained(tmp_path: Path) -> None:
    run = Run(tmp_path, free_ports(), CONFIG)
    agent = subprocess.Popen([sys.executable, str(ROOT / "examples" / "agent_openai.py"), str(run.folder)])
    summary = run.wait(1600)
    check_promises(summary)
    assert agent.wait(60) == 0
    assert summary["reward_first"] <= 0.4 and summary["reward_last"] >= 0.85 and summary["eval_after"] >= 0.95
