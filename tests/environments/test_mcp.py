"""Tools of servers of the Model Context Protocol, which are real processes, and are killed."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocols.experience import Prompt
from penstock.services.environments.config import EnvironmentConfig
from penstock.services.environments.pool import EnvironmentPool
from penstock.services.environments.tools_config import McpServerConfig, PythonConfig, ToolsConfig, read_options
from penstock.services.runtime.user_folders import VARIABLE
from penstock.services.user_processes.worker import ProgramError
from tests.environments import mcp_toy

pytest.importorskip("mcp")
mcp_transport = pytest.importorskip("penstock.services.environments.mcp_transport")
TOY = f"{sys.executable} {mcp_toy.__file__}"
SERVER = {"command": TOY, "timeout_s": 25}


class Policy:
    """Calls tools, and reads what they give."""

    def __init__(self, timeout_s: float = 30, **options: Any) -> None:
        self.pool = EnvironmentPool(EnvironmentConfig(environment="tools", options=options, timeout_s=timeout_s))
        self._said: queue.Queue[Any] = queue.Queue()

    def begin(self, session: int) -> list[dict[str, Any]]:
        self.pool.reset(session, Prompt(index=0, text="p"), lambda found, error: self._said.put(found or error))
        return [tool["function"] for tool in self._said.get(timeout=30)["tools"]]

    def ask(self, session: int, *calls: tuple[str, dict[str, Any]]) -> None:
        text = "".join(f"<tool_call>{json.dumps({'name': n, 'arguments': a})}</tool_call>" for n, a in calls)
        self.pool.step(session, text, lambda found, error: self._said.put(error if found is None else found))

    def read(self) -> list[str]:
        found = self._said.get(timeout=30)
        return [found] if isinstance(found, str) else [message["content"] for message in found["observation"]]

    def call(self, session: int, *calls: tuple[str, dict[str, Any]]) -> list[str]:
        self.ask(session, *calls)
        return self.read()


@pytest.fixture(scope="module")
def shared() -> Iterator[Policy]:
    """One server for all trajectories, beside a function, and with a secret that only its environment has."""
    os.environ["TOY_SECRET"] = "hush"
    server = {**SERVER, "env": ["TOY_SECRET"], "tools": ["add", "note", "wait"], "prefix": "toy_"}
    policy = Policy(functions=["tests.environments.games:add"], mcp=[server], longest=200)
    policy.begin(1), policy.begin(2)
    yield policy
    policy.pool.close()


def test_its_tools_are_told_of_and_called_at_once(shared: Policy) -> None:
    about = shared.begin(3)
    assert [tool["name"] for tool in about] == ["add", "toy_add", "toy_note", "toy_wait"]
    assert about[1]["description"] == "Adds two numbers." and about[1]["parameters"]["required"] == ["a"]
    began = time.monotonic()
    found = shared.call(1, *[("toy_wait", {"seconds": 1.0})] * 8, ("toy_add", {"a": 2}), ("add", {"a": 5}))
    assert found == ["waited"] * 8 + ["3", "6"] and time.monotonic() - began < 6
    (wrong,) = shared.call(1, ("toy_add", {"a": "x"}))
    assert wrong.startswith("error: add: ") and "valid integer" in wrong and len(wrong) <= 200


def test_one_that_is_killed_costs_what_was_under_way(shared: Policy) -> None:
    (said,) = shared.call(1, ("toy_note", {"text": "a"}))
    number, secret, _ = said.split(" ")
    assert secret == "hush" and shared.call(2, ("toy_note", {"text": "b"})) == [f"{number} hush a,b"]
    shared.ask(1, ("toy_wait", {"seconds": 60}), ("toy_wait", {"seconds": 60}))
    time.sleep(0.3)
    os.kill(int(number), signal.SIGKILL)
    assert shared.read() == [f"error: wait: {TOY} ended before it answered"] * 2
    (again,) = shared.call(2, ("toy_note", {"text": "c"}))
    assert again.endswith("hush c") and not again.startswith(number) and shared.pool.restarts == 0


def test_sessions_of_trajectories_are_apart_and_end_with_them_or_with_their_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late.py").write_text(f"import time; time.sleep(1); exec(open({mcp_toy.__file__!r}).read())")
    monkeypatch.setenv(VARIABLE, json.dumps([str(tmp_path)]))  # its script is beside the config
    late = {"command": f"{sys.executable} late.py", "per": "trajectory", "timeout_s": 1}  # less than a start takes
    policy = Policy(70, mcp=[late])
    try:
        for session in (1, 2):
            policy.begin(session)
            policy.ask(session, ("note", {"text": "a"}))
        numbers = [int(said.split(" ")[0]) for said in policy.read() + policy.read()]
        (more,) = policy.call(1, ("note", {"text": "b"}))
        assert len({*numbers}) == 2 and more.endswith("a,b")
        first = psutil.Process(int(more.split(" ")[0]))
        (second,) = (psutil.Process(number) for number in numbers if number != first.pid)
        policy.pool.end(1)
        first.wait(20)
        assert second.is_running()
        guard = second.parent()
        assert guard
        worker = guard.parent()
        assert worker
        worker.kill()
        second.wait(20), guard.wait(20)
    finally:
        policy.pool.close()


def test_a_server_over_http_that_forgets_its_sessions_costs_nothing_and_one_that_breaks_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOY_TOKEN", "hush")
    server = mcp_toy.Sessions()
    again: list[mcp_toy.Sessions] = []
    headers = {"Authorization": "Bearer ${TOY_TOKEN}"}
    policy = Policy(mcp=[{"url": server.url, "headers": headers, "timeout_s": 3}])
    try:
        assert [tool["name"] for tool in policy.begin(1)] == ["look"]
        assert policy.call(1, ("look", {})) == ["session-0\n[image image/png]"]
        server.known = {"another", "and one more"}
        assert policy.call(1, ("look", {}))[0].startswith("session-2")
        broken, other = policy.call(1, ("look", {"die": True}), ("look", {}))
        assert broken.startswith("error: look: the connection broke") and other == "session-2\n[image image/png]"
        server.refuses = True
        assert policy.call(1, ("look", {})) == ["error: look: HTTP 503 Service Unavailable"]
        assert {*server.authorized} == {"Bearer hush"}
        server.shutdown(), server.server_close()
        began = threading.Timer(0.5, lambda: again.append(mcp_toy.Sessions(server.server_port)))
        began.start()
        assert policy.call(1, ("look", {})) == ["session-0\n[image image/png]"], "it was waited for"
        again[0].shutdown(), again[0].server_close()
        (gone,) = policy.call(1, ("look", {}))
        assert gone.startswith(f"raised ToolUnavailable: mcp.0 ({server.url}): it is not reached"), "not the policy's"
    finally:
        policy.pool.close()


def test_one_that_answers_nothing_any_more_is_started_again_and_one_that_is_slow_is_not() -> None:
    policy = Policy(mcp=[{"command": TOY, "timeout_s": 0.8}])
    try:
        policy.begin(1)
        number = psutil.Process(int(policy.call(1, ("note", {"text": "a"}))[0].split(" ")[0]))
        assert "did not answer within" in policy.call(1, *[("wait", {"seconds": 30})] * 3)[0]
        time.sleep(0.9)
        assert policy.call(1, ("add", {"a": 1})) == ["2"] and number.is_running()
        number.suspend()
        policy.call(1, *[("add", {"a": 1})] * 3)
        number.wait(20)
    finally:
        policy.pool.close()


def test_half_a_character_costs_its_own_call_alone(shared: Policy) -> None:
    shared.ask(2, ("toy_wait", {"seconds": 0.5}))
    (read,) = shared.call(1, ("toy_note", {"text": "\ud83d"}))
    assert read == "error: toy_note: arguments have half of a character (a surrogate without its pair)"
    assert shared.read() == ["waited"]


def test_what_breaks_over_http_costs_one_call_and_a_forgotten_session_none() -> None:
    server = mcp_toy.Sessions()
    policy = Policy(mcp=[{"url": server.url, "timeout_s": 8}])
    try:
        policy.begin(1), policy.begin(2)
        for broken, read in (({"x": "\ud83d"}, "error: look: arguments have"), ({"cut": 1}, "error: look: the conn")):
            policy.ask(2, ("look", {"seconds": 0.5}))
            assert policy.call(1, ("look", broken))[0].startswith(read)
            assert policy.read()[0].startswith("session-0"), "another's is answered"
        server.hangs.clear()  # it does not answer to a session's end
        error = {"jsonrpc": "2.0", "id": "server-error", "error": {"code": -32600, "message": "Session not found"}}
        for forgotten in ((404, error), (400, {"error": "Bad Request: No valid session ID provided"})):
            server.known, server.forgotten = {f"old-{number}" for number in range(len(server.known) + 1)}, forgotten
            assert policy.call(1, ("look", {}))[0].startswith(f"session-{len(server.known) - 1}"), forgotten
            server.hangs.set()
    finally:
        server.hangs.set()
        policy.pool.close()
        server.shutdown(), server.server_close()


@pytest.mark.parametrize(
    ("server", "complaint"),
    [
        ({"command": f"{sys.executable} -c 'exit(3)'"}, "it ended with exit code 3"),
        ({"command": f"{sys.executable} -c 'input();input()'", "start_s": 0.5}, "it was not ready within 0.5 s"),
        ({"tools": ["lok"]}, r"mcp.0.tools: .* has no 'lok'; did you mean 'look'\?"),
        ({"prefix": "over"}, "both called 'overlook', and the policy could not say which it means; set prefix of one"),
        ({"command": TOY, "env": ["NO_SUCH_THING"]}, "mcp.0: NO_SUCH_THING is not set in the environment; export it"),
        ({"url": "http://127.0.0.1:9/mcp?token=${HOME}"}, r"mcp.0 \(http://127.0.0.1:9/mcp\?token=\$\{HOME\}\): it is"),
    ],
)
def test_what_does_not_begin_is_told_with_its_key(server: dict[str, Any], complaint: str) -> None:
    toy = mcp_toy.Sessions()
    named = server if {"command", "url"} & server.keys() else {"url": toy.url, **server}
    options = {"functions": ["tests.environments.games:overlook"], "mcp": [named]}
    kind = ConnectionError if {"command", "url"} & server.keys() and "env" not in server else ProgramError
    with pytest.raises(kind, match=f"rollout.environment.options: .*{complaint}"):
        EnvironmentPool(EnvironmentConfig(environment="tools", options=options))
    toy.shutdown(), toy.server_close()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "no tools are given"),
        ({"mcp": [{}]}, "mcp.0: give command, which starts a server, or url"),
        ({"mcp": [{"command": "a", "url": "http://b"}]}, "mcp.0: give command, which starts a server, or url"),
        ({"mcp": [{"comand": "a"}]}, "mcp.0.comand: unknown key; did you mean 'command'"),
        ({"mcp": [{"command": "a 'b"}]}, "mcp.0.command: it is no command: No closing quotation"),
        ({"mcp": [{"command": "a", "env": ["TOKEN=hush"]}]}, "mcp.0.env: 'TOKEN': give the variable's name alone"),
        ({"mcp": [{"command": "a", "env": ["TOKEN: hush"]}]}, "mcp.0.env: 'TOKEN': give the variable's name alone"),
        ({"mcp": [{"url": "http://a", "headers": {"X-Api-Key": "hush"}}]}, "a secret is in the environment alone"),
        ({"mcp": [{"url": "http://me:hush@a"}]}, "mcp.0.url: it has a secret"),
        ({"mcp": [{"url": "http://a?api_key=hush"}]}, "mcp.0.url: it has a secret"),
        ({"mcp": [{"url": "a/mcp"}]}, "mcp.0.url: it is no URL"),
        ({"mcp": [{"url": "me:hush@a/mcp"}]}, "mcp.0.url: it is no URL"),
        ({"mcp": [{"url": "http://[hush"}]}, "mcp.0.url: it is no URL"),
        ({"mcp": [{"command": "a", "env": {"TOKEN": "hush"}}]}, "mcp.0.env: it is no list; give the names alone, e.g."),
        ({"mcp": [{"command": "a", "env": [["hush"]]}]}, "mcp.0.env.0: Input should be a valid string"),
        ({"mcp": [{"url": "http://a", "headers": {"A": ["hush"]}}]}, "mcp.0.headers.A: Input should be a valid string"),
        ({"mcp": {"command": "hush"}}, "mcp: Input should be a valid list"),
        ({"functions": ["pyton"]}, "'pyton' is neither module:function nor one of python"),
        ({"functions": ["a:b"], "python": {"seconds": 3}}, "add python to functions"),
        ({"functions": ["python"], "longest": 0}, "longest: Input should be greater"),
    ],
)
def test_wrong_options_are_refused_by_their_key(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError) as refused:
        read_options(options)
    assert complaint in str(refused.value) and "hush" not in str(refused.value)


def test_a_call_may_not_outlast_its_step() -> None:
    first = {"command": "a", "per": "trajectory", "start_s": 15, "timeout_s": 15}
    late = {"functions": ["python"], "python": {"seconds": 40}}
    for options in ({"mcp": [{"command": "a", "timeout_s": 30}]}, {"mcp": [first]}, late):
        with pytest.raises(ValueError, match="is not below timeout_s=30, after which the whole step has failed"):
            EnvironmentConfig(environment="tools", options=options)


def test_the_docs_have_every_option_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    told = dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) ?\| ", page, re.MULTILINE))
    for section in (ToolsConfig, McpServerConfig, PythonConfig):
        for name, field in section.model_fields.items():
            name = field.alias or name
            assert name in told, name
            if isinstance(field.default, bool | int | float):
                assert told[name] == str(field.default).lower().removesuffix(".0"), name


@given(st.lists(st.binary(max_size=8).map(lambda text: text.replace(b"\n", b"-")), max_size=9), st.integers(1, 5))
def test_lines_are_whole_however_their_bytes_come(lines: list[bytes], size: int) -> None:
    async def read() -> list[bytes]:
        stream = asyncio.StreamReader()
        said = b"".join(line + b"\n" for line in lines) + b"without an end"
        stream.feed_data(said)
        stream.feed_eof()
        whole = stream.read
        stream.read = lambda _: whole(size)  # type: ignore[method-assign, assignment]
        return [line async for line in mcp_transport._lines(stream)]

    assert asyncio.run(read()) == lines
