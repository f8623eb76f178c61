"""Environments as services: they lease sessions from a gateway, over the real door, and play them to their end."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.pipeline import cli
from penstock.protocols import agent_client
from penstock.protocols.agent_client import AsyncAgentSession, Reply
from penstock.protocols.experience import PICTURE, Group, Prompt
from penstock.protocols.mailbox import DeadlineError
from penstock.services.data import open_source
from penstock.services.data.config import NumbersData, ReasoningGymData
from penstock.services.data.pictures import in_parts
from penstock.services.environments.tool_calls import calls_in
from penstock.services.gateway.asking import content_of
from penstock.services.gateway.errors import AgentError
from penstock.services.gateway.zmq_door import ZmqDoor
from penstock.services.players import openenv, playing, reasoning_gym
from penstock.services.players.base import Played, Player, PlayError, as_messages
from penstock.services.players.openenv import OpenEnvConfig, OpenEnvPlayer
from penstock.services.players.own import as_said, of_calls
from penstock.services.players.playing import Score, play_run
from penstock.services.players.registry import make_player
from penstock.services.players.verifiers import VerifiersPlayer
from penstock.services.runtime.errors import SetupError
from penstock.services.turns.tool_calls import read_call
from tests import seeing, shown
from tests.gateway.conftest import model, tokenizers  # noqa: F401 - fixtures
from tests.gateway.house import CALLS, House
from tests.gateway.test_doors import NO_KEYS
from tests.gateway.test_turn_rewards import ending, lying
from tests.rollout.test_torch_engine import engine_for

LENGTH = 128


@pytest.fixture
def house(tokenizers: dict[bool, Path], model: Any) -> House:  # noqa: F811
    engine = engine_for(model, {1}, max_length=LENGTH)
    return House(tokenizers[True], model, tool_calls=CALLS, attempts=2, engine=engine, max_length=LENGTH)


def played(
    house: House, environment: str | Player, options: Mapping[str, Any], groups: int = 4, at_once: int = 3
) -> Score:
    """What comes of ``groups`` of two sessions each, when ``environment`` plays them."""

    async def run() -> Score:
        door = ZmqDoor("tcp://127.0.0.1:*", house.desk, None, NO_KEYS)
        door.start(asyncio.get_running_loop(), "http://here")
        for number in range(groups):
            house.desk.start(house.lease(number, n=2))
        player = make_player(environment, options, "none") if isinstance(environment, str) else environment
        playing_it = asyncio.ensure_future(play_run(door.address, None, player, at_once))
        while len(house.delivered) < groups and not playing_it.done():
            await asyncio.sleep(0.02)
        house.desk.end("all is played")
        try:
            return await playing_it
        finally:
            await asyncio.to_thread(door.close)

    return house.run(run, 60)


def made(house: House, number: int) -> Group:
    found = house.delivered["train", number]
    assert isinstance(found, Group), found
    return found


def test_what_a_class_shows_is_seen(tmp_path: Path) -> None:
    seeing.write("qwen2_5_vl", tmp_path)
    engine, text = seeing.engine(tmp_path, LENGTH)
    house = House(engine=engine, text=text, max_length=LENGTH, pictures=True)
    score = played(house, "tests.players.envs:Shown", {"max_turns": 3}, groups=2)
    assert score.played == 4 and set(score.last) == {2.0}
    red, green = (shown.picture(shown.COLOURS[name]) for name in "rg")
    for trajectory in (each for number in range(2) for each in made(house, number).trajectories):
        assert trajectory.pictures == (red, green) and len(trajectory.turns) == 2 and not trajectory.failure


def test_a_task_is_told_in_the_parts_in_which_a_rollout_tells_it() -> None:
    prompt = Prompt(index=0, text=f"what is {PICTURE}", pictures=(b"a",))
    assert prompt.text is not None
    (said,) = as_messages(prompt)
    assert said["content"] == [{"type": "text", "text": "what is "}, {"type": "image", "image": b"a"}]
    assert [part["type"] for part in said["content"]] == [part["type"] for part in in_parts(prompt.text)]
    assert content_of([{"type": "text", "text": ""}, {"type": "text", "text": "a"}]) == "a"


def test_a_class_of_ones_own_plays_and_what_raises_costs_its_session(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(playing, "PAUSE_S", 0.01)
    score = played(house, "tests.players.envs:Twice", {"max_turns": 5, "options": {"worth": 0.25}})
    assert score.played == 6 and score.given_up == 4 and set(score.last) == {0.5}
    for number in range(3):
        for trajectory in made(house, number).trajectories:
            assert float(trajectory.rewards.sum()) == 0.5 and trajectory.metrics == {"turns": 2.0, "seen": 2.0}
            assert len(trajectory.turns) == 2 and not trajectory.failure
    assert not any(ending(house, number)["truncated"] for number in range(3))
    failed = made(house, 3).trajectories
    assert all("no idea" in t.failure for t in failed), "given out gateway.attempts times, then without a reward"


@pytest.mark.parametrize("form", ["hermes", "xml", "json"])
def test_methods_that_are_tools_give_a_reward_where_no_turn_is_left(form: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"step": 3}'}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    nothing, turns = np.zeros(0, np.int32), iter((1, 2))

    async def chat(messages: Any, tools: Any) -> Reply:
        return Reply(next(turns), message, "stop", nothing, nothing, nothing, 0.0)

    task = Prompt(index=0, text="count", truth={"prompt": "count", "target": 6})
    session: Any = SimpleNamespace(task=task, chat=chat)
    options = {"class": "tests.environments.games:Adding", "tool_calls": form}
    player = make_player("tools", {"max_turns": 2, "options": options}, "none")

    async def play() -> Played:
        try:
            return await player.play(session)
        finally:
            await player.close()

    assert asyncio.run(play()) == Played(0.0, {"turns": 2.0}, {1: 0.0, 2: 1.0}, truncated=True)


def test_an_object_is_closed_also_where_it_could_not_begin(house: House, tmp_path: Path) -> None:
    told = tmp_path / "told"
    score = played(house, "tests.players.envs:Closing", {"options": {"told": str(told)}}, groups=2)
    assert (score.played, score.given_up) == (2, 4)
    assert told.read_text().splitlines() == ["closed"] * 6


def test_who_dies_of_anothers_fault_begins_again_and_loses_no_attempt(house: House) -> None:
    options = {"max_turns": 5, "workers": 1}
    score = played(house, "tests.players.envs:Deadly", options, groups=4, at_once=8)
    assert score.played == 6 and score.given_up == 4, "those that killed their worker, twice each"
    for number in (0, 2, 3):
        group = made(house, number)
        assert not any(t.failure for t in group.trajectories)
        assert {float(t.rewards.sum()) for t in group.trajectories} == {1.0}
    assert all("crashed with exit code 1" in t.failure for t in made(house, 1).trajectories)


def test_an_openenv_connection_that_cannot_be_closed_costs_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def __init__(self, **_: Any) -> None:
            pass

        async def connect(self) -> None:
            pass

        async def reset(self, seed: int) -> Any:
            return SimpleNamespace(observation={}, reward=1.0, done=True)

        async def close(self) -> None:
            await asyncio.sleep(60)

    monkeypatch.setattr(openenv, "need", lambda *_: None)
    monkeypatch.setattr(openenv, "CLOSE_S", 0.05)
    monkeypatch.setitem(sys.modules, "openenv.core.generic_client", SimpleNamespace(GenericEnvClient=Client))
    player = OpenEnvPlayer(OpenEnvConfig(url="http://here", action="message"))
    session: Any = SimpleNamespace(task=Prompt(index=0, text="1+1="))
    assert asyncio.run(player.play(session)) == Played(1.0, {"turns": 0.0})


class Client:
    """Stands for OpenEnv's: an episode of one step, after which it wants a reset."""

    def __init__(self, **_: Any) -> None:
        self._over = False

    async def connect(self) -> None: ...

    async def close(self) -> None: ...

    async def reset(self, seed: int) -> Any:
        return SimpleNamespace(observation={"words": "go"}, reward=0.0, done=False)

    async def step(self, action: dict[str, Any]) -> Any:
        if action["type"] == "list_tools":
            return SimpleNamespace(observation={"tools": [{"name": "look"}]}, reward=0.0, done=False)
        if self._over:
            raise RuntimeError("the episode is over")
        self._over = True
        return SimpleNamespace(observation={"words": "won"}, reward=1.0, done=True)


def openenv_player(monkeypatch: pytest.MonkeyPatch) -> OpenEnvPlayer:
    monkeypatch.setattr(openenv, "need", lambda *_: None)
    monkeypatch.setitem(sys.modules, "openenv.core.generic_client", SimpleNamespace(GenericEnvClient=Client))
    return OpenEnvPlayer(OpenEnvConfig(url="http://here"))


def test_an_openenv_episode_that_is_done_is_not_stepped_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def chat(*_: Any) -> Any:
        return SimpleNamespace(turn=4, message={}, calls=[("look", {}, "1"), ("look", {}, "2")])

    session: Any = SimpleNamespace(task=Prompt(index=0, text="1+1="), chat=chat)
    assert asyncio.run(openenv_player(monkeypatch).play(session)) == Played(0.0, {"turns": 1.0}, {4: 1.0})


def test_a_gateway_that_is_away_is_not_an_openenv_environments_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def chat(*_: Any) -> Any:
        raise DeadlineError("no answer from the gateway")

    session: Any = SimpleNamespace(task=Prompt(index=0, text="1+1="), chat=chat)
    with pytest.raises(DeadlineError, match="the gateway"):
        asyncio.run(openenv_player(monkeypatch).play(session))


@pytest.mark.parametrize("ends", ["too_many_turns", "context_length_exceeded", "no_answer", ""])
def test_a_verifiers_episode_that_came_to_the_end_of_its_room_is_over(ends: str) -> None:
    refused = AgentError(400, ends, "no")
    errors = [SimpleNamespace(type="ProviderError", message=json.dumps(refused.body))] if ends else []
    trace = trace_of("agent", 0.5, {"calls": 2, "late": None}, errors)
    if ends == "no_answer":
        with pytest.raises(PlayError, match="ProviderError: .*no_answer"):
            verifiers_plays(trace, ok=not ends)
    else:
        assert verifiers_plays(trace, ok=not ends) == Played(0.5, {"calls": 2.0}, truncated=bool(ends))


def test_a_verifiers_game_that_somebody_wins_from_another_is_refused() -> None:
    with pytest.raises(PlayError, match=r"several agents .* different rewards \(first 1, second -1\)"):
        verifiers_plays(trace_of("first", 1.0), trace_of("second", -1.0))
    assert verifiers_plays(trace_of("first", 0.5), trace_of("second", 0.5)).reward == 1.0
    assert verifiers_plays(trace_of("assistant", 1.0), trace_of("user", 0.0, learns=False)).reward == 1.0


def trace_of(
    name: str,
    reward: float,
    metrics: dict[str, Any] | None = None,
    errors: list[Any] | None = None,
    learns: bool = True,
) -> Any:
    about: dict[str, Any] = {"errors": errors or [], "metrics": metrics or {}, "is_truncated": False}
    return SimpleNamespace(agent=SimpleNamespace(name=name, trainable=learns), reward=reward, **about)


def verifiers_plays(*traces: Any, ok: bool = True) -> Played:
    async def run_episode(*_: Any) -> Any:
        return SimpleNamespace(ok=ok, errors=[], traces=traces)

    player = VerifiersPlayer.__new__(VerifiersPlayer)
    player._library = SimpleNamespace(EvalClientConfig=lambda **_: None, ModelContext=lambda **_: None)
    player._tasks, player._env = [None], SimpleNamespace(run_episode=run_episode)
    session: Any = SimpleNamespace(task=Prompt(index=0, text="1+1="), base_url="http://here")
    return asyncio.run(player.play(session))


class Measuring:
    """A player whose metrics no gateway takes."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def play(self, session: AsyncAgentSession) -> Played:
        await session.chat([{"role": "user", "content": "sort ba="}])
        return Played(1.0, {"accuracy/all": 1.0})


def test_a_session_whose_end_is_refused_is_given_up(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "PAUSE_S", 0.01)
    score = played(house, Measuring(), {}, groups=1)
    assert (score.played, score.given_up) == (0, 4)
    assert all(
        "given out 2 times (gateway.attempts): metrics: 'accuracy/all'" in t.failure
        for t in made(house, 0).trajectories
    )


def test_a_run_that_has_ended_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"outcome": "complete"}')
    told = CliRunner().invoke(cli.app, ["play", str(tmp_path), "tests.players.envs:Twice"])
    assert told.exit_code == 0 and "the run is over: 0 played" in told.output


@pytest.mark.parametrize(("turns", "read"), [(60, True), (3, False)])
def test_a_task_without_end_ends_after_its_turns_or_where_there_is_no_room(
    house: House, turns: int, read: bool
) -> None:
    house.desk._reads = lambda source: read
    score = played(house, "tests.players.envs:Endless", {"max_turns": turns}, groups=1)
    for trajectory in made(house, 0).trajectories:
        assert not trajectory.failure
        had = int(trajectory.metrics["turns"])
        assert had == 3 if turns == 3 else 2 < had < 30, had
        assert had in score.last and ending(house)["truncated"]
        assert lying(trajectory) == (dict.fromkeys(range(had), 1.0) if read else {had - 1: float(had)})


def test_reasoning_gym_asks_a_groups_sessions_the_same(house: House) -> None:
    pytest.importorskip("reasoning_gym")
    options = {"size": 3, "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    score = played(house, "reasoning_gym:chain_sum", options, groups=4)
    assert score.played == 8
    asked = []
    for number in range(4):
        group = made(house, number)
        first, second = (t.tokens[t.loss_mask == 0] for t in group.trajectories)
        assert np.array_equal(first, second)
        asked.append(first.tolist())
    assert asked[0] == asked[3] and asked[0] != asked[1], "three tasks: the fourth row has the first one"


def test_an_answer_that_takes_for_ever_to_be_scored_costs_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scorer of a countdown computes what the policy writes."""
    monkeypatch.setattr(reasoning_gym, "SCORE_S", 2.0)
    player = reasoning_gym.ReasoningGymPlayer(ReasoningGymData(task="countdown", size=2))
    answers = {0: "9**9**9**9", 1: "1"}

    def session(index: int) -> Any:
        async def chat(*_: Any) -> Reply:
            reply: Any = SimpleNamespace(text=answers[index])
            return reply

        return SimpleNamespace(task=Prompt(index=index, text=""), chat=chat)

    async def main() -> None:
        await player.open()
        with pytest.raises(PlayError, match="its answer cannot be scored: it timed out"):
            await player.play(session(0))
        assert (await player.play(session(1))).reward is not None
        await player.close()

    asyncio.run(main())


def test_an_openenv_server_is_played(house: House) -> None:
    server = pytest.importorskip("openenv.core.env_server.http_server")
    import uvicorn
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Said(Action):
        message: str

    class Heard(Observation):
        words: str = ""

    class Echo(Environment):  # type: ignore[type-arg]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._steps = 0

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
            self._steps, self._seed = 0, seed
            return Heard(words=f"sort {seed}=", done=False, reward=0.0)

        def step(self, action: Said, timeout_s: float | None = None, **_: Any) -> Heard:  # type: ignore[override]
            self._steps += 1
            return Heard(words=f"heard {len(action.message)}", done=self._steps == 2, reward=0.5)

        @property
        def state(self) -> State:
            return State(episode_id="", step_count=self._steps)

    app = server.create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=8)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        served = uvicorn.Server(uvicorn.Config(app, log_config=None))
        thread = threading.Thread(target=served.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until = time.monotonic() + 20
        while not served.started and time.monotonic() < until:
            time.sleep(0.05)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        score = played(house, f"openenv:{url}", {"action": "message", "observation": "words"})
        served.should_exit = True
        thread.join(10)
    assert score.played == 8 and set(score.last) == {1.0}
    first, second = made(house, 1).trajectories
    begun = [int(np.flatnonzero(t.loss_mask)[0]) for t in (first, second)]
    assert np.array_equal(first.tokens[: begun[0]], second.tokens[: begun[1]]), "seeded by the task"
    assert "heard" in first.text


@pytest.mark.parametrize(
    ("environment", "options", "match"),
    [
        ("nothing", [], "neither module:Class nor one of tools"),
        ("tests.players.envs:Twice", ["-o", "max_turn=3"], "max_turn: Extra inputs"),
        ("tests.players.envs:Twice", ["-o", "max_turns"], "--option: override 'max_turns' is not of the form"),
        ("reasoning_gym:nonsense", [], "nonsense"),
        ("reasoning_gym:chain_sum", ["-o", "chat=false"], "chat=false: a session is a conversation"),
        ("openenv:http://127.0.0.1:9", ["-o", "max_turns=0"], "max_turns|openenv is not installed"),
    ],
)
def test_what_cannot_be_made_is_told(environment: str, options: list[str], match: str) -> None:
    told = CliRunner().invoke(cli.app, ["play", "tcp://127.0.0.1:9", environment, *options])
    assert isinstance(told.exception, SetupError | ValueError) and re.search(match, str(told.exception)), told.exception


def test_a_gateway_that_does_not_answer_ends_it_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "WAIT_S", 0.5)
    monkeypatch.setattr(agent_client, "GRACE_S", 0.5)
    told = CliRunner().invoke(cli.app, ["play", "tcp://127.0.0.1:9", "tests.players.envs:Twice", "--sessions", "3"])
    assert told.exit_code == 1 and isinstance(told.exception, SystemExit)
    assert "no session for 0.5 s" in told.output and "tcp://127.0.0.1:9" in told.output and "Start this" in told.output


def test_calls_are_told_to_a_class_as_hermes_writes_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    none = np.zeros(0, np.int32)
    reply = Reply(0, {"content": "Well.", "tool_calls": [call]}, "stop", none, none, none, 0.0)
    assert as_said(reply) == 'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert as_said(reply, words=False) == as_said(reply).removeprefix("Well.\n")
    arguments = {"code": "</tool_call><tool_call>{}"}
    call = {**call, "function": {"name": "add", "arguments": json.dumps(arguments)}}
    reply = Reply(0, {"content": "", "tool_calls": [call]}, "stop", none, none, none, 0.0)
    ((name, read),) = [read_call(each) for each in calls_in(as_said(reply), "hermes", {})]
    assert (name, read) == ("add", arguments), "what an argument says ends no call"


def test_results_are_told_of_which_calls_they_are() -> None:
    called = [{"id": f"call{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in (1, 2)]
    reply: Any = SimpleNamespace(message={"role": "assistant", "content": "", "tool_calls": called})
    results = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b", "tool_call_id": "own"}]
    told = of_calls([*results, {"role": "tool", "content": "c"}, {"role": "user", "content": "d"}], reply)
    assert [message.get("tool_call_id") for message in told] == ["call1", "own", "call2", None]


def test_prompts_that_are_numbers() -> None:
    source = open_source(NumbersData(size=3, first=5))
    assert [prompt.index for prompt in source] == [5, 6, 7] and len(source) == 3
