"""What an environment does wrong costs its own session, and nothing else."""

from __future__ import annotations

import asyncio
import queue
import re
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.protocols.experience import Prompt
from penstock.services.environments.config import EnvironmentConfig
from penstock.services.environments.past import Past, Replays
from penstock.services.environments.pool import EnvironmentPool
from penstock.services.environments.sessions import LOST
from penstock.services.environments.tools import Tools
from penstock.services.user_processes.worker import ProgramError

HERE = "tests.environments.games"
PROMPT = Prompt(index=0, text="p")


class Player:
    """Calls, one after the other or at once."""

    def __init__(self, environment: str, **more: Any) -> None:
        told = {"environment": environment if environment == "tools" else f"{HERE}:{environment}"} | more
        self.pool = EnvironmentPool(EnvironmentConfig.model_validate(told))

    def begin(self, *sessions: int) -> None:
        assert all(self.ask([("reset", session, PROMPT) for session in sessions]))

    def ask(self, calls: list[tuple[str, int, Any]]) -> list[Any]:
        """What each gave, or what went wrong as text."""
        said: queue.Queue[tuple[int, Any]] = queue.Queue()
        for index, (op, session, given) in enumerate(calls):
            heard = lambda found, error, index=index: said.put((index, error if found is None else found))  # noqa: E731
            if op == "finish":
                self.pool.finish(session, heard)
            else:
                (self.pool.reset if op == "reset" else self.pool.step)(session, given, heard)
        return [found for _, found in sorted((said.get(timeout=30) for _ in calls), key=lambda pair: pair[0])]

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()


def test_sessions_are_apart() -> None:
    with Player("Counting", options={"turns": 3}, workers=2) as player:
        player.begin(1, 2, 3)
        first = player.ask([("step", session, "x") for session in (1, 2, 3)])
        assert (
            first
            == [
                {
                    "observation": "turn 1=",
                    "reward": 0.5,
                    "done": False,
                    "pictures": [],
                    "metrics": {"said": 1.0, "turn_1": 0.5},
                }
            ]
            * 3
        )
        assert player.ask([("step", 2, "x")])[0]["reward"] == 1.0
        assert player.ask([("step", 1, "x"), ("step", 2, "x")])[1]["done"]


def test_wrong_answers_of_an_environment_are_named() -> None:
    with Player("Misbehaving") as player:
        player.begin(1, 2, 3, 4, 5)
        found = player.ask([("step", n, said) for n, said in enumerate(("raise", "nan", "list", "silent", "text"), 1)])
        assert "raised RuntimeError: no idea" in found[0] and "games.py, line" in found[0]
        assert "reward nan" in found[1] and "step returned list" in found[2] and "no observation" in found[3]
        assert "step gave metrics: 'no/name': a name is like" in player.ask([("step", 5, "measure")])[0]
        assert found[4] == {"observation": "go on", "reward": 0.0, "done": False, "pictures": [], "metrics": {}}


@pytest.mark.parametrize("deed", ["hang", "crash"])
def test_who_was_in_the_same_process_goes_on_or_begins_again_where_its_object_drifts(deed: str) -> None:
    with Player("Misbehaving", timeout_s=1.0) as player:
        player.begin(1, 2, 3, 4)
        told = [("step", n, said) for n, said in ((2, "text"), (3, "pid"), (4, "text"))]
        before = player.ask(told)
        found = player.ask([("step", 1, deed), *(("step", n, "x") for n in (2, 3)), ("step", 4, deed)])
        assert found[0] == found[3] == {"hang": "timed out after 1 s", "crash": "crashed with exit code 3"}[deed]
        assert found[1]["observation"] == "well= 2" and before[0]["observation"] == "go on"
        assert found[2] == LOST and player.pool.restarts == 2
        player.begin(3)
        assert player.ask([("step", 3, "x")])[0]["observation"] == "well= 1"


def test_nobody_is_told_again_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.services.environments.past.MOST_LOST", 3)
    asked: list[tuple[Any, ...]] = []
    heard: list[Any] = []

    def call(*about: Any) -> Any:
        asked.append(about[:2])
        if about[1] != "close":
            about[3](None, LOST)

    past = Past(told=[("reset", None), ("step", None)], found=[{}])
    Replays(False, call).begin(7, past, lambda found, error: heard.append(error))
    assert heard == ["its worker died too often"] and asked == [(7, "reset")] * 4 + [(7, "close")]


def test_an_async_environment_waits_for_all_at_once() -> None:
    with Player("Waiting", timeout_s=1.5) as player:
        started = time.monotonic()
        player.begin(*range(50))
        found = player.ask([("step", n, "hang" if n == 7 else "done" if n % 2 else "x") for n in range(50)])
        assert time.monotonic() - started < 10
        assert found[7].startswith("timed out") and found[9]["done"] and found[8]["observation"] == "go on"


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        (f"{HERE}:NeedsMore", "cannot be made with the options"),
        (f"{HERE}:Stepless", "has no method step"),
        (f"{HERE}:add", "it must be a class"),
        (f"{HERE}:Counted", "did you mean 'Counting'"),
    ],
)
def test_what_is_no_environment_is_refused(environment: str, complaint: str) -> None:
    with pytest.raises(ProgramError, match=complaint):
        EnvironmentPool(EnvironmentConfig(environment=environment))


def test_tools_are_called_and_told_of() -> None:
    functions = [f"{HERE}:add", f"{HERE}:look_up", f"{HERE}:hint"]
    pool = EnvironmentPool(EnvironmentConfig(environment="tools", options={"functions": functions}))
    try:
        said: queue.Queue[Any] = queue.Queue()

        def ask(answer: str) -> Any:
            pool.step(1, answer, lambda found, error: said.put(found or error))
            return said.get(timeout=30)

        pool.reset(1, Prompt(index=0, text="p", truth="ab"), lambda found, error: said.put(found or error))
        about = said.get(timeout=30)["tools"]
        assert [tool["function"]["name"] for tool in about] == ["add", "look_up", "hint"]
        assert about[0]["function"]["description"] == "Adds two numbers."
        assert about[0]["function"]["parameters"]["required"] == ["a"]
        place = {"place": {"title": "Place", "type": "integer"}}
        assert (
            about[2]["function"]["parameters"] | {"properties": place, "required": ["place"]}
            == (about[2]["function"]["parameters"])
        )
        assert "$defs" not in about[2]["function"]["parameters"]
        told = ask('<tool_call>{"name": "hint", "arguments": {"place": 1, "task": "mine"}}</tool_call>')
        assert told["observation"] == [{"role": "tool", "content": "b"}]
        both = ask(
            'Let me see. <tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
            '<tool_call>\n{"name": "look_up", "arguments": {"word": "gate"}}\n</tool_call>'
        )
        assert both["observation"] == [
            {"role": "tool", "content": "5"},
            {"role": "tool", "content": '{"word": "gate"}'},
        ]
        wrong = {
            "{": "a call is JSON",
            '{"name": "subtract"}': "there are add, look_up, hint",
            '{"name": "add", "arguments": {"a": "x"}}': "a: Input should be a valid integer",
            '{"name": "look_up", "arguments": {"word": "nothing"}}': "raised KeyError",
        }
        for call, complaint in wrong.items():
            found = ask(f"<tool_call>{call}</tool_call>")
            assert complaint in found["observation"][0]["content"] and not found["done"]
        assert ask("It is 5.")["done"]
    finally:
        pool.close()


def test_many_long_answers_and_calls_do_not_wait_for_each_other() -> None:
    with Player("Wordy", timeout_s=10) as player:
        found = player.ask([("reset", session, Prompt(index=0, text="b" * 20_000)) for session in range(256)])
        assert all(len(each["prompt"]) == 20_000 for each in found) and player.pool.restarts == 0


def test_what_cannot_be_said_or_counted_is_the_calls_own_failure() -> None:
    with Player("Wordy") as player:
        player.begin(0, 1)
        huge, odd = player.ask([("step", 0, "huge"), ("step", 1, "odd")])
        assert "reward 1e+39" in huge and "surrogates not allowed" in odd and player.pool.restarts == 0


def test_leaving_the_process_is_an_error_like_any_other() -> None:
    with Player("Leaving") as player:
        player.begin(0, 1)
        gone, fine = player.ask([("step", 0, "leave"), ("step", 1, "on")])
        assert "SystemExit" in gone and fine["observation"] == "go on" and player.pool.restarts == 0


def test_tools_that_reset_sets_are_heard_of_also_where_it_is_async() -> None:
    with Player("Late") as player:
        (begun,) = player.ask([("reset", 1, PROMPT)])
        assert begun["tools"][0]["function"]["name"] == "look"


def test_a_call_that_is_cancelled_or_has_a_timeout_of_its_own_is_its_own_failure() -> None:
    with Player("Late", timeout_s=2.0) as player:
        player.begin(1, 2, 3)
        found = player.ask([("step", 1, "cancelled"), ("step", 2, "its own timeout"), ("step", 3, "x")])
        assert found[0].startswith("raised CancelledError") and found[1].startswith("raised TimeoutError")
        assert found[2]["observation"] == "go on" and player.pool.restarts == 0


def test_maps_that_no_other_process_could_read_cost_their_session_alone() -> None:
    with Player("Numbered") as player:
        good, bad = player.ask([("reset", 1, PROMPT), ("reset", 2, Prompt(index=7, text="p"))])
        assert not good["tools"] and "map key" in bad
        assert player.ask([("step", 1, "x")])[0]["observation"] == "go on" and player.pool.restarts == 0
    with pytest.raises(ProgramError, match=r"rollout.environment.options: .* maps with text for keys"):
        EnvironmentPool(EnvironmentConfig(environment=f"{HERE}:Numbered", options={"table": "\ud800"}))


@pytest.mark.parametrize("environment", ["Sandbox", "AsyncSandbox"])
def test_what_is_open_at_the_end_is_closed(environment: str, tmp_path: Path) -> None:
    with Player(environment, options={"told": str(tmp_path / "told")}) as player:
        player.begin(1, 2, 3)
        player.pool.end(2)
    assert sorted((tmp_path / "told").read_text().split()) == ["closed"] * 3 + ["opened"] * 3


def test_a_worker_that_hangs_is_not_waited_for_at_the_end() -> None:
    with Player("Misbehaving") as player:
        player.begin(1)
        player.pool.step(1, "hang", lambda found, error: None)
        began = time.monotonic()
    assert time.monotonic() - began < 8


def test_a_result_that_json_has_not_is_told_to_the_policy() -> None:
    functions = [f"{HERE}:pairs", f"{HERE}:half"]
    pool = EnvironmentPool(EnvironmentConfig(environment="tools", options={"functions": functions}))
    said: queue.Queue[Any] = queue.Queue()
    try:
        pool.reset(1, PROMPT, lambda found, error: said.put(found or error))
        said.get(timeout=30)
        calls = [
            f'<tool_call>{{"name": "{name}", "arguments": {{"text": "ab"}}}}</tool_call>' for name in ("pairs", "half")
        ]
        pool.step(1, "".join(calls), lambda found, error: said.put(found or error))
        first, second = (message["content"] for message in said.get(timeout=30)["observation"])
        assert "error: pairs raised TypeError: keys must be" in first and second == "?"
    finally:
        pool.close()


def test_tools_that_hang_are_in_nobodys_way() -> None:
    functions = [f"{HERE}:add", f"{HERE}:stuck"]
    pool = EnvironmentPool(EnvironmentConfig(environment="tools", options={"functions": functions}, timeout_s=1))
    said: queue.Queue[tuple[int, Any]] = queue.Queue()
    try:
        for session in range(41):
            pool.reset(session, PROMPT, lambda found, error: said.put((0, found or error)))
        assert all(isinstance(said.get(timeout=30)[1], dict) for _ in range(41))
        for session in range(40):
            stuck = '<tool_call>{"name": "stuck", "arguments": {}}</tool_call>'
            pool.step(session, stuck, lambda found, error: said.put((1, found or error)))
        assert all("timed out" in said.get(timeout=30)[1] for _ in range(40))
        add = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
        pool.step(40, add, lambda found, error: said.put((2, found or error)))
        assert said.get(timeout=30)[1]["observation"] == [{"role": "tool", "content": "3"}] and pool.restarts == 0
    finally:
        pool.close()


def test_a_call_that_is_wrong_is_told_what_was() -> None:
    tools = Tools([f"{HERE}:add"])

    def said(arguments: str) -> str:
        turn = asyncio.run(tools.step(f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'))
        assert turn.observation and not isinstance(turn.observation, str)
        return turn.observation[0]["content"]

    assert said('"{\\"a\\": 1}"').startswith("error: add: arguments must be an object")
    assert said("[1, 2]").startswith("error: add: arguments must be an object")
    assert "Missing required argument" in said("null")


def test_a_policy_does_not_read_the_reward_that_a_tool_of_verls_returns() -> None:
    call = '<tool_call>{"name": "executed", "arguments": {"parameters": {}}}</tool_call>'
    with pytest.raises(
        TypeError, match=r"executed returned a tuple with a reward .* give the reward in get_reward\(\)"
    ):
        asyncio.run(Tools([f"{HERE}:executed"]).step(call))


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"games:add and tests\.environments\.games:add are both called 'add'"):
        Tools([f"{HERE}:add", f"{HERE}:add"])


def add(*steps: int) -> str:
    calls = [f'<tool_call>{{"name": "add", "arguments": {{"step": {step}}}}}</tool_call>' for step in steps]
    return "".join(calls)


DOUBLE = '<tool_call>{"name": "double"}</tool_call>'


@pytest.mark.parametrize("name", ["Adding", "AsyncAdding"])
def test_methods_are_tools_of_an_object_of_each_trajectory(name: str) -> None:
    row = {"prompt": "count", "target": 6}
    count = Prompt(index=0, messages=[{"role": "user", "content": "count"}], truth=row)
    with Player("tools", options={"class": f"{HERE}:{name}", "class_options": {"limit": 8}}) as player:
        begun = player.ask([("reset", n, count) for n in (1, 2, 3)])
        assert begun[0]["prompt"] == [{"role": "user", "content": "count to 6"}]
        told = [tool["function"] for tool in begun[0]["tools"]]
        assert [(each["name"], each["description"]) for each in told] == [
            ("add", "Adds to the counter."), ("double", "Doubles the counter.")
        ]  # fmt: skip
        assert [list(each["parameters"]["properties"]) for each in told] == [["step"], []]
        found = player.ask([("step", 1, add(1, 2) + DOUBLE), ("step", 2, add(9, 1)), ("step", 3, "no")])
        assert [m["content"] for m in found[0]["observation"]] == ["1", "3", "6 of 6"], "one call after the other"
        assert [m["content"] for m in found[1]["observation"]] == ["error: add raised ValueError: too much", "1"]
        assert found[2]["done"] and found[2]["reward"] == 0.0 and not found[1]["done"]
        assert player.ask([("finish", 1, None), ("finish", 2, None)]) == [{"reward": 1.0}, {"reward": 0.01}]
        (wrong,) = player.ask([("reset", 4, Prompt(index=0, messages=count.messages, truth="6"))])
        assert "reset asks for target, and the truth of its row has no columns; prompts.train.truth_key" in wrong
        (wrong,) = player.ask([("reset", 5, Prompt(index=0, messages=count.messages, truth={"goal": 6}))])
        assert "the truth of its row has goal; prompts.train.truth_key=null gives the whole row" in wrong
        if name == "Adding":
            died, lives, _ = player.ask([("step", 2, add(-1)), ("step", 1, add(1)), ("step", 3, add(1))])
            assert died == "crashed with exit code 3" and player.pool.restarts == 1
            assert lives["observation"][0]["content"] == "7", "a new object was told the same"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"class": f"{HERE}:Unexplained"}, "games:Unexplained.go has no docstring"),
        ({"class": f"{HERE}:add"}, "is a function; it must be a class"),
        ({"class": f"{HERE}:Adding", "class_options": {"top": 1}}, "cannot be made with class_options={'top': 1}"),
        ({"class": f"{HERE}:Adding", "functions": [f"{HERE}:add"]}, "are both called 'add'"),
        ({"class": f"{HERE}:Empty"}, "has no method that could be a tool"),
    ],
)
def test_a_class_that_has_no_tools_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        Tools(**options)
