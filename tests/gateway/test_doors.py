"""The real clients of OpenAI and Anthropic, and `AgentClient`, against the doors as they are served."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
import uvicorn
from typer.testing import CliRunner

from penstock.pipeline import cli
from penstock.pipeline.run.lock import held
from penstock.protocols import agent_line
from penstock.protocols.agent_client import AgentClient, AgentRefusedError, AsyncAgentClient, RunOver
from penstock.protocols.agent_line import Search
from penstock.protocols.experience import Group
from penstock.services.gateway import bodies
from penstock.services.gateway.access import Access
from penstock.services.gateway.http import make_app
from penstock.services.gateway.patience import ImpatientProtocol
from penstock.services.gateway.zmq_door import ZmqDoor
from tests.gateway.house import CALLS, House

SAY: list[Any] = [{"role": "user", "content": "sort ba="}]
TOOL: Any = {"type": "function", "function": {"name": "reveal", "parameters": {"type": "object"}}}


@pytest.fixture
def house(tokenizers: dict[bool, Path], model: Any) -> House:
    made = House(tokenizers[True], model, tool_calls=CALLS)
    made.desk.start(made.lease(0, n=2))
    return made


def owners(folder: Path, key: str) -> Access:
    """Of a run in ``folder`` whose owner has this ``key``, which is asked for."""
    (folder / "keys").mkdir(exist_ok=True)
    (folder / "keys" / "agents.key").write_text(key + "\n")
    return Access(folder, required=True)


NO_KEYS = Access(Path("nowhere"), required=False)


def served(house: House, agent: Callable[[str], Awaitable[Any]], access: Access = NO_KEYS, seconds: float = 60) -> Any:
    """What ``agent``, given the gateway's URL, returns."""

    async def main() -> Any:
        app = make_app(house.desk, "policy", access)
        server = uvicorn.Server(uvicorn.Config(app, http=ImpatientProtocol, port=0, log_config=None, lifespan="off"))
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            return await agent(f"http://127.0.0.1:{port}")
        finally:
            server.should_exit = True
            await serving

    return house.run(main, seconds)


async def opened(url: str, client: httpx.AsyncClient) -> dict[str, Any]:
    answer = await client.post(f"{url}/v1/sessions", json={"wait_s": 1})
    assert answer.status_code == 200, answer.text
    return answer.json()


def group(house: House, number: int = 0) -> Group:
    made = house.delivered["train", number]
    assert isinstance(made, Group), made
    return made


def test_openais_client(house: House) -> None:
    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            for reward in (1.0, 0.0):
                session = await opened(url, http)
                assert session["task"]["text"] == "sort ba="
                by_path = {"base_url": session["base_url"], "api_key": "none"}
                by_key = {"base_url": f"{url}/v1", "api_key": session["session"]}
                async with openai.AsyncOpenAI(**(by_path if reward else by_key)) as client:
                    assert [model.id async for model in await client.models.list()] == ["policy"]
                    first = await client.chat.completions.create(
                        model="policy", messages=SAY, tools=[TOOL], logprobs=True, max_tokens=4
                    )
                    (choice,) = first.choices
                    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
                    assert choice.logprobs and choice.logprobs.content and first.usage
                    assert len(choice.logprobs.content) == first.usage.completion_tokens
                    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "ab"}
                    then = [*SAY, choice.message, result]
                    stream = await client.chat.completions.create(
                        model="policy", messages=then, tools=[TOOL], stream=True, logprobs=True,
                        stream_options={"include_usage": True},
                    )  # fmt: skip
                    parts = [part async for part in stream]
                    called = [p for p in parts if p.choices and p.choices[0].delta.tool_calls]
                    assert called and json.loads(called[0].choices[0].delta.tool_calls[0].function.arguments)
                    assert parts[-1].usage and parts[-1].usage.prompt_tokens > first.usage.total_tokens
                    assert parts[-1].model_extra["penstock"]["turns"] == [1]
                    said = [p.choices[0].logprobs.content for p in parts if p.choices and p.choices[0].logprobs]
                    assert len(said) == 1 and len(said[0]) == parts[-1].usage.completion_tokens
                done = await http.post(f"{url}/v1/sessions/{session['session']}/finish", json={"reward": reward})
                assert done.json()["state"] == "finished"
                again = await http.post(f"{url}/v1/sessions/{session['session']}/finish", json={"reward": reward})
                assert again.status_code == 200, "said twice, it is true"

    served(house, agent)
    made = group(house)
    assert [float(t.rewards.sum()) for t in made.trajectories] == [1.0, 0.0]
    assert [len(t.turns) for t in made.trajectories] == [2, 2], "spliced, not branched"


def test_openais_client_asks_for_several_and_again(house: House) -> None:
    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            session = await opened(url, http)
            several = {"messages": SAY, "n": 3}
            many = await http.post(f"{session['base_url']}/chat/completions", json=several)
            assert len({str(c["message"]) for c in many.json()["choices"]}) > 1 and len(house.engines_own) == 3
            once, again = [
                await http.post(
                    f"{session['base_url']}/chat/completions",
                    json={"messages": SAY},
                    headers={"x-stainless-retry-count": str(count)},
                )
                for count in (0, 1)
            ]
            assert once.json()["choices"] == again.json()["choices"] and len(house.engines_own) == 4
            path = f"{session['base_url']}/chat/completions"
            repeated = await http.post(path, json=several, headers={"x-stainless-retry-count": "1"})
            assert repeated.json()["penstock"]["turns"] == [3, 1, 2], "the latest of each; none is said twice"
            named = [
                (await http.post(path, json={"messages": SAY}, headers={"idempotency-key": key})).json()
                for key in ("a", "b", "a")
            ]
            assert [each["penstock"]["turns"] for each in named] == [[4], [5], [4]] and len(house.engines_own) == 6
            await http.post(f"{url}/v1/sessions/{session['session']}/finish", json={"reward": 1.0})
            other = await opened(url, http)
            await http.post(f"{url}/v1/sessions/{other['session']}/finish", json={"reward": 0.5})

    served(house, agent)
    made = group(house)
    assert len(made.trajectories) == 7, "six branches, and a session in which nothing was said"
    assert sum(t.sampled for t in made.trajectories) == sum(len(a.tokens) for a in house.engines_own)
    assert "no turn" in made.trajectories[-1].failure


def test_anthropics_client(house: House) -> None:
    tool: Any = {"name": "reveal", "input_schema": {"type": "object"}}
    say: list[Any] = [{"role": "user", "content": "ba="}]

    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            for by_key in (False, True):
                session = await opened(url, http)
                base = url if by_key else session["base_url"].removesuffix("/v1")
                async with anthropic.AsyncAnthropic(base_url=base, api_key=session["session"]) as client:
                    about: Any = {"model": "policy", "tools": [tool]}
                    counted = await client.messages.count_tokens(messages=say, **about)
                    first = await client.messages.create(messages=say, max_tokens=4, **about)
                    assert first.stop_reason == "tool_use" and first.usage.input_tokens == counted.input_tokens
                    (call,) = first.content
                    result = {"type": "tool_result", "tool_use_id": call.id, "content": "ab"}
                    then: Any = [*say, {"role": "assistant", "content": first.content},
                                 {"role": "user", "content": [result]}]  # fmt: skip
                    async with client.messages.stream(messages=then, max_tokens=4, **about) as stream:
                        last = await stream.get_final_message()
                    assert last.stop_reason == "tool_use" and last.usage.output_tokens
                await http.post(f"{url}/v1/sessions/{session['session']}/finish", json={"reward": 1.0})

    served(house, agent)
    assert [len(t.turns) for t in group(house).trajectories] == [2, 2]


def test_anthropics_own_loop_over_tools_sends_its_whole_history(house: House) -> None:
    """By itself it says the newest messages alone, of a thread that its server keeps: it is told that there are none
    here, and does without, or the policy would be asked, and trained, without what was said before."""

    @anthropic.beta_async_tool
    async def reveal(letters: str) -> str:
        """Reveals letters."""
        return "ab"

    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            for _ in range(2):
                session = await opened(url, http)
                base = session["base_url"].removesuffix("/v1")
                async with anthropic.AsyncAnthropic(base_url=base, api_key="none") as client:
                    runner = client.beta.messages.tool_runner(
                        model="policy", max_tokens=4, tools=[reveal], max_iterations=2,
                        messages=[{"role": "user", "content": "ba="}],
                    )  # fmt: skip
                    assert len([message async for message in runner]) == 2
                await http.post(f"{url}/v1/sessions/{session['session']}/finish", json={"reward": 1.0})

    served(house, agent)
    assert [len(t.turns) for t in group(house).trajectories] == [2, 2]


@pytest.mark.parametrize("stateful", [False, True])
def test_openais_responses(house: House, stateful: bool) -> None:
    """With what was said before, or with the last response's id alone: it is gone on from the same tokens."""
    tool: Any = {"type": "function", "name": "reveal", "parameters": {"type": "object"}}

    async def turns(client: openai.AsyncOpenAI) -> None:
        about: Any = {"model": "policy", "tools": [tool], "instructions": "b"}
        first = await client.responses.create(
            input="a", max_output_tokens=2, include=["message.output_text.logprobs"], **about
        )
        (call,) = first.output
        assert call.type == "function_call" and json.loads(call.arguments) and first.usage
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "b"}
        said: Any = [{"role": "user", "content": "a"}, *first.output, result]
        more = {"previous_response_id": first.id, "input": [result]} if stateful else {"input": said}
        async with client.responses.stream(**more, **about) as stream:
            events: Any = [event async for event in stream]
        seen, last = [event.type for event in events], events[-1].response
        assert seen[0] == "response.created" and seen[-1] in ("response.completed", "response.incomplete")
        assert "response.function_call_arguments.done" in seen and last.output[0].type == "function_call"
        assert last.usage and last.usage.input_tokens > first.usage.total_tokens
        plain = await client.responses.create(model="policy", input=[{"role": "user", "content": "a"}])
        assert plain.output_text and plain.id != last.id

    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            for _ in range(2):
                session = await opened(url, http)
                async with openai.AsyncOpenAI(base_url=session["base_url"], api_key="none") as client:
                    await turns(client)
                await http.post(f"{url}/v1/sessions/{session['session']}/finish", json={"reward": 1.0})

    served(house, agent)
    assert [len(t.turns) for t in group(house).trajectories] == [2, 1, 2, 1]


def test_clients_tell_the_chat_template_more(house: House) -> None:
    house.text.plain.chat_template = house.text.plain.chat_template.replace("<assistant>", "{{ level }}=")
    told = {"chat_template_kwargs": {"level": "b"}}

    async def agent(url: str) -> set[str]:
        async with httpx.AsyncClient(timeout=60) as http:
            session = await opened(url, http)
        base = session["base_url"]
        async with openai.AsyncOpenAI(base_url=base, api_key="none") as client:
            await client.chat.completions.create(model="policy", messages=SAY, extra_body=told)
            await client.responses.create(model="policy", input=SAY, extra_body=told)
        async with anthropic.AsyncAnthropic(base_url=base.removesuffix("/v1"), api_key="none") as client:
            await client.messages.create(model="policy", max_tokens=4, messages=SAY, extra_body=told)
        door = ZmqDoor("tcp://127.0.0.1:*", house.desk, None, NO_KEYS)
        door.start(asyncio.get_running_loop(), "http://here")
        try:
            async with AsyncAgentClient(door.address) as agents, await agents.session() as other:
                await other.chat(SAY, **told)
                every = [held.session for held in house.desk._held.values()]
        finally:
            await asyncio.to_thread(door.close)
        return {house.text.decode([turn.given.tolist()])[0][-2:] for one in every for turn in one.turns.values()}

    assert served(house, agent) == {"b="}


def test_openais_completions(house: House) -> None:
    """Text is gone on from where it begins with an answer: the answer's tokens are not made again."""

    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            for _ in range(2):
                session = await opened(url, http)
                async with openai.AsyncOpenAI(base_url=session["base_url"], api_key="none") as client:
                    first = await client.completions.create(model="policy", prompt="sort ba=", logprobs=0, n=2)
                    assert first.usage and len(first.choices) == 2 and first.choices[0].logprobs
                    longer = "sort ba=" + first.choices[0].text + "ab"
                    parts = [p async for p in await client.completions.create(
                        model="policy", prompt=longer, max_tokens=2, stream=True)]  # fmt: skip
                    assert parts[-1].choices[0].finish_reason and parts[-1].model_extra["penstock"]["turns"] == [2]
                    ids = await client.completions.create(model="policy", prompt=[5, 6, 7], max_tokens=2)
                    assert ids.usage and ids.usage.prompt_tokens == 3 and ids.usage.completion_tokens <= 2
                await http.post(f"{url}/v1/sessions/{session['session']}/finish", json={"reward": 1.0})

    served(house, agent)
    made = group(house)
    assert [len(t.turns) for t in made.trajectories] == [1, 2, 1] * 2
    assert sum(t.sampled for t in made.trajectories) == sum(len(a.tokens) for a in house.engines_own)


def test_too_many_waiting_turns_are_told_to_ask_again(tokenizers: dict[bool, Path], model: Any) -> None:
    house = House(tokenizers[True], model, waiting=1)
    house.desk.start(house.lease(0))

    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            session = await opened(url, http)
            ask = {"messages": SAY, "n": 3}
            busy = await http.post(f"{session['base_url']}/chat/completions", json=ask)
            assert busy.status_code == 429 and float(busy.headers["retry-after"]) > 0
            assert "gateway.waiting=1" in busy.json()["error"]["message"]

    served(house, agent)


def test_who_does_not_read_its_answer_is_not_waited_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImpatientProtocol, "unread_s", 0.3)

    async def agent(url: str) -> None:
        port = int(url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
        asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        begun = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - begun < 20:
                writer.write(asked * 20)  # so many answers that they lie in no buffer
                await writer.drain()
                await asyncio.sleep(0.01)
        assert time.monotonic() - begun < 20
        async with httpx.AsyncClient(timeout=60) as http:
            assert (await http.get(f"{url}/v1/sessions")).status_code == 200

    served(house, agent)


def test_who_does_not_say_what_it_wants_is_not_waited_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImpatientProtocol, "headers_s", 0.5)
    monkeypatch.setattr(bodies, "BODY_S", 0.5)
    headers = b"POST /v1/sessions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"

    async def said(url: str, *parts: bytes) -> bytes:
        """What is answered until the line is closed, to parts that come one by one."""
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.2)
        found = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return found

    async def agent(url: str) -> None:
        slow = await asyncio.gather(*(said(url, *headers[:k].splitlines(True)) for k in (0, 10, 60) for _ in range(50)))
        assert set(slow) == {b""}
        stuck = await said(url, headers + b"connection: close\r\ncontent-length: 20\r\n\r\n", b"{")
        assert stuck.startswith(b"HTTP/1.1 408") and b"too_slow" in stuck
        async with httpx.AsyncClient(timeout=60) as http:
            await opened(url, http)
            await asyncio.sleep(1)
            await opened(url, http)  # between requests there is time

    served(house, agent)


def test_what_an_agent_did_not_stay_to_hear_is_not_trained_on(house: House) -> None:
    async def agent(url: str) -> None:
        said, slow = house.say, asyncio.Event()

        def later(message: Any, deadline_s: float) -> Any:
            """The policy takes its time."""
            found = said(message, deadline_s)
            if not hasattr(message, "prompt"):
                return found
            late: Future[Any] = Future()
            asyncio.get_running_loop().call_later(
                2.0, lambda: found.add_done_callback(lambda done: (late.set_result(done.result()), slow.set()))
            )
            return late

        house.desk._policy._say = later
        async with httpx.AsyncClient(timeout=60) as http:
            session = await opened(url, http)
            asking = asyncio.ensure_future(http.post(f"{session['base_url']}/chat/completions", json={"messages": SAY}))
            await asyncio.sleep(0.5)
            asking.cancel()
            await asyncio.wait_for(slow.wait(), 20)
            house.desk._policy._say = said
            for own in (session["session"], (await opened(url, http))["session"]):
                await http.post(f"{url}/v1/sessions/{own}/finish", json={"reward": 1.0})

    served(house, agent)
    assert len(house.engines_own) == 1 and not any(t.sampled for t in group(house).trajectories)


def test_agents_that_open_and_go_leave_nothing_behind(house: House) -> None:
    """Who is gone before it hears of its session has not had it."""

    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            first, last = await opened(url, http), await opened(url, http)
            gone = [asyncio.ensure_future(http.post(f"{url}/v1/sessions", json={"wait_s": 30})) for _ in range(200)]
            await asyncio.sleep(1)
            for one in gone:
                one.cancel()
            await asyncio.gather(*gone, return_exceptions=True)
        async with httpx.AsyncClient(timeout=60) as http:
            for session in (first, last):
                await http.post(f"{url}/v1/sessions/{session['session']}/abandon", json={})
            await asyncio.sleep(1)
            assert {(await opened(url, http))["session"] for _ in range(2)} == {"train-0-0-1", "train-0-1-1"}

    served(house, agent)


def test_whoever_asks_at_a_path_that_is_none_is_told_which_there_are(house: House, tmp_path: Path) -> None:
    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            session = await opened(url, http)
            for base in (f"{session['base_url']}/v1", url, f"{url}/nowhere"):
                for ask in (http.post(f"{base}/chat/completions", json={"messages": SAY}), http.get(f"{base}/models")):
                    told = await ask
                    about = told.json()["error"]
                    assert told.status_code == 404 and about["code"] == "unknown_path", told.text
                    assert "…/s/SESSION/v1" in about["message"] and "/openapi.json" in about["message"]
            other = await http.get(f"{session['base_url']}/chat/completions")
            assert other.status_code == 405 and other.headers["allow"] == "POST"
            assert other.json()["error"]["code"] == "unknown_path"

    served(house, agent)


def test_models_are_told_of_to_both_clients(house: House) -> None:
    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            session = await opened(url, http)
        async with openai.AsyncOpenAI(base_url=session["base_url"], api_key="none") as client:
            assert (await client.models.retrieve("policy")).id == "policy"
            with pytest.raises(openai.NotFoundError, match="'policy' alone"):
                await client.models.retrieve("gpt/4")
        async with anthropic.AsyncAnthropic(base_url=url, api_key=session["session"]) as client_too:
            (model,) = [each async for each in client_too.models.list()]
            assert (model.id, model.type, model.display_name) == ("policy", "model", "policy")
            assert (await client_too.models.retrieve("policy")).created_at.year == 1970

    served(house, agent)


async def _endless() -> AsyncIterator[bytes]:
    for _ in range(64):
        yield b" " * (1 << 20)


def test_bad_requests_cost_themselves(house: House, tmp_path: Path) -> None:
    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60, headers={"authorization": "Bearer right"}) as http:
            session = await opened(url, http)
            base, own = session["base_url"], f"{url}/v1/sessions/{session['session']}"
            assert (await http.post(f"{url}/v1/sessions", json={"wait_s": 0}, headers={"authorization": "Bearer no"})
                    ).status_code == 401  # fmt: skip
            wrong: list[tuple[str, Any, int]] = [
                (f"{url}/s/train-9-9-9/v1/chat/completions", {"messages": SAY}, 404),
                (f"{base}/chat/completions", {"messages": []}, 422),
                (f"{base}/chat/completions", {"messages": SAY, "n": 1000}, 422),
                (f"{base}/chat/completions", {"messages": "sort"}, 422),
                (f"{base}/chat/completions", {"messages": [{"role": "king", "content": "a"}]}, 422),
                (f"{base}/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 422),
                (f"{base}/chat/completions", {"messages": SAY, "tools": [{"type": "function"}]}, 422),
                (f"{base}/chat/completions", {"messages": SAY, "response_format": {"type": "xml"}}, 400),
                (f"{base}/completions", {"prompt": []}, 422),
                (f"{base}/responses", {"input": []}, 422),
                (f"{base}/responses", {"input": "a", "previous_response_id": "resp_7"}, 404),
                (f"{base}/responses", {"input": "a", "tools": [{"type": "web_search"}]}, 400),
                (f"{base}/responses", {"input": [{"type": "item_reference", "id": "x"}]}, 404),
                (f"{base}/responses", {"input": [{"type": "computer_call", "id": "x"}]}, 400),
                (f"{base}/responses", {"input": "a", "conversation": "conv_1"}, 422),
                (f"{base}/chat/completions", {"messages": SAY, "functions": [{"name": "f"}]}, 422),
                (f"{base}/chat/completions", {"messages": SAY, "continue_final_message": True}, 422),
                (f"{base}/chat/completions", {"messages": SAY, "modalities": ["text", "audio"]}, 422),
                (f"{base}/chat/completions", {"messages": SAY, "audio": {"voice": "a"}}, 422),
                (f"{base}/chat/completions", {"messages": SAY, "web_search_options": {}}, 422),
                (f"{base}/chat/completions", {"messages": SAY, "chat_template_kwargs": {"a": 1}}, 400),
                (f"{base}/chat/completions", {"messages": SAY, "chat_template_kwargs": {"tokenize": True}}, 422),
                (f"{base}/messages", {"messages": SAY, "max_tokens": 4, "chat_template_kwargs": "{a"}, 422),
                (f"{base}/responses", {"input": "a", "background": True}, 422),
                (f"{base}/responses", {"input": "a", "truncation": "auto"}, 422),
                (f"{base}/responses", {"input": "a", "context_management": [{"type": "compaction"}]}, 422),
                (f"{base}/messages", {"messages": SAY, "max_tokens": 4, "compaction": {"type": "summarize"}}, 422),
                (f"{base}/messages", {"messages": SAY, "max_tokens": 4, "mcp_servers": [{"name": "m"}]}, 422),
                (f"{base}/messages/count_tokens", {"messages": SAY, "thread": {"type": "new"}}, 400),
                (f"{base}/messages", {"messages": [*SAY, {"role": "assistant", "content": "a"}], "max_tokens": 4}, 422),
                (f"{base}/completions", {"prompt": "a", "best_of": 2}, 422),
                (f"{base}/completions", {"prompt": "a", "echo": True}, 422),
                (
                    f"{base}/messages",
                    {"messages": SAY, "max_tokens": 4, "tools": [{"type": "bash_20250124", "name": "bash"}]},
                    422,
                ),
                (f"{base}/responses", {"input": "a", "text": {"format": {"type": "json_schema"}}}, 400),
                (
                    f"{base}/messages",
                    {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 4},
                    422,
                ),
                (f"{base}/chat/completions", {"messages": [{"role": "user", "content": "a" * 500}]}, 400),
                (f"{base}/generate", {"tokens": [2**31]}, 422),
                (f"{base}/generate", {"tokens": [5000]}, 400),
                (f"{own}/finish", {"reward": "good"}, 422),
                (f"{own}/finish", {}, 422),
                (f"{own}/finish", {"reward": 1.0, "more": 1}, 422),
                (f"{own}/abandon", {"reason": "x" * 2000}, 422),
            ]
            house.desk._settled_at = 0.0
            for key, status in {
                "right": 404, "right:": 404, "right:train-9-9-9": 404, session["session"]: 401,
                f"no:{session['session']}": 401, f"right:{session['session']}": 200,
            }.items():  # fmt: skip
                answer = await http.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})
                assert answer.status_code == status and "right" not in answer.text, key
            for path, body, status in wrong:
                answer = await http.post(path, json=body)
                assert (answer.status_code, bool(answer.json()["error"]["message"])) == (status, True), path
            broken = await http.post(f"{own}/finish", content=b"{no json")
            assert broken.status_code == 422 and "the body is no JSON: " in broken.json()["error"]["message"]
            assert (await http.post(f"{own}/finish", content=b" " * (17 << 20))).status_code == 413
            endless = http.post(f"{own}/finish", content=_endless())
            assert (await endless).status_code == 411, "nobody reads a body that does not say how long it is"
            curl = {"content": b'{"reward": 1.0}', "headers": {"content-type": "application/x-www-form-urlencoded"}}
            page = {"origin": "https://example.org"} | curl["headers"]
            assert (await http.post(f"{own}/finish", **curl | {"headers": page})).status_code == 422
            assert (await http.post(f"{own}/finish", **curl)).status_code == 200
            await opened(url, http)
            waited = await http.post(f"{url}/v1/sessions", json={"wait_s": 0})
            assert waited.status_code == 503 and float(waited.headers["retry-after"]) > 0
            house.desk.end("it is late")
            over = await http.post(f"{url}/v1/sessions", json={"wait_s": 9})
            assert over.status_code == 410 and over.json()["error"]["code"] == "run_over"

    served(house, agent, owners(tmp_path, "right"))


def test_sessions_are_listed_beside_a_gateway_that_is_silent_and_through_no_proxy(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    (tmp_path / "gateways").mkdir()
    (tmp_path / "gateways" / "gateway-1.json").write_text(json.dumps({"http": "http://127.0.0.1:9"}))
    runner = CliRunner()

    async def agent(url: str) -> None:
        (tmp_path / "gateways" / "gateway-0.json").write_text(json.dumps({"http": url}))
        async with httpx.AsyncClient(timeout=60, headers={"x-api-key": "right"}, trust_env=False) as http:
            session = await opened(url, http)
            await http.post(f"{session['base_url']}/chat/completions", json={"messages": SAY})
        told = await asyncio.to_thread(runner.invoke, cli.app, ["agents", str(tmp_path), "--json"])
        assert "warning: gateway-1 does not answer at http://127.0.0.1:9" in told.stderr
        ((row,),) = json.loads(told.stdout).values()
        assert row["session"] == session["session"] and row["turns"] == 1 and row["tokens"] > 8 and not row["error"]
        shown = await asyncio.to_thread(runner.invoke, cli.app, ["agents", str(tmp_path)])
        assert "1 sessions" in shown.output and session["session"] in shown.output
        idle_s = house.desk.config.idle_s
        assert row["by"] == "HTTP" and idle_s - 30 < row["given_on_s"] <= idle_s
        for wrong in (False, True):
            again = await asyncio.to_thread(
                runner.invoke, cli.app, ["agents", str(tmp_path), "--abandon", session["session"]]
            )
            said = str(again.exception) if wrong else again.output
            assert ("no agent has a session" if wrong else f"{session['session']} is given on") in said, said
        (tmp_path / "gateways" / "gateway-0.json").unlink()
        told = await asyncio.to_thread(runner.invoke, cli.app, ["agents", str(tmp_path)])
        assert "gateway-1 does not answer" in str(told.exception)

    served(house, agent, owners(tmp_path, "right"))


def test_who_comes_after_the_runs_end_is_told_so_and_who_comes_early_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_line, "START_S", 2.0)
    over, stopped = tmp_path / "over", tmp_path / "stopped"
    for folder, outcome in ((over, "failed"), (stopped, "interrupted")):
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps({"outcome": outcome}))

    async def enter(folder: Path) -> None:
        async with AsyncAgentClient(folder):
            pass

    async def beside() -> list[float]:
        waiting, gaps, last = asyncio.ensure_future(enter(stopped)), [], time.monotonic()
        while not waiting.done():
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        with pytest.raises(FileNotFoundError, match="no gateway for"):
            await waiting
        return gaps

    for attempt in (lambda: AgentClient(over), lambda: asyncio.run(enter(over))):
        with pytest.raises(RunOver, match="has ended"):
            attempt()
    with pytest.raises(FileNotFoundError):  # such a run may go on
        AgentClient(stopped)
    assert max(asyncio.run(beside())) < 1.5
    with held(over):  # somebody goes on with it
        Search(over, None).look()
        (over / "summary.json").write_text('{"outcome": "complete"}')
        with pytest.raises(RunOver):
            Search(over, None).look()


def test_an_agent_that_waits_for_a_run_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent_line, "START_S", 1.0)
    monkeypatch.setattr(agent_line, "TELL_S", 0.2)
    for folder, why in ((tmp_path / "nowhere", "no such folder"), (tmp_path, "none is there yet")):
        with pytest.raises(FileNotFoundError, match="is it the folder of a run with gateway.count above 0"):
            AgentClient(folder)
        assert capsys.readouterr().err == f"waiting up to 1 s for a gateway in {folder}: {why}\n"
    with pytest.raises(FileNotFoundError, match=f"^{tmp_path}/no/such/where: no such folder, nor is {tmp_path}/no one"):
        AgentClient(tmp_path / "no" / "such" / "where")
    search = Search(tmp_path, None)
    with held(tmp_path):
        for _ in range(2):
            search._since = search._began = time.monotonic() - 10.0  # so long it has looked
            assert search.look() is None
        assert (
            capsys.readouterr().err
            == f"waiting while the run is prepared for a gateway in {tmp_path}: none is there yet\n"
        )
        (tmp_path / "broker.address").touch()
        search._since -= 10.0
        with pytest.raises(FileNotFoundError):  # it has begun, and has no gateway
            search.look()


def test_the_zeromq_client(house: House) -> None:
    async def agent() -> list[Any]:
        door = ZmqDoor("tcp://127.0.0.1:*", house.desk, None, NO_KEYS)
        door.start(asyncio.get_running_loop(), "http://here")
        heard = []
        try:
            async with AsyncAgentClient(door.address) as client:
                async with await client.session() as session:
                    first = await session.chat(SAY, [TOOL])
                    ((name, _, id),) = first.calls
                    assert name == "reveal" and session.base_url.startswith("http://here/s/train-0-0")
                    result = {"role": "tool", "tool_call_id": id, "content": "ab"}
                    second = await session.chat([*SAY, first.message, result], [TOOL])
                    with pytest.raises(AgentRefusedError, match="no room is left"):
                        await session.generate(np.ones(64, np.int32))
                    heard += [first, second]
                    await session.finish(reward=1.0)
                try:
                    async with await client.session() as session:
                        raise KeyError("the agent's own")
                except KeyError:
                    pass
                async with await client.session() as session:
                    assert session.id == "train-0-1-1", "given again, from the start"
                    heard.append(await session.generate(house.text.encode(session.task), max_tokens=2))
                    await session.finish(reward=0.0)
                house.desk.end("it is late")
                with pytest.raises(RunOver, match="late"):
                    await client.session()
        finally:
            await asyncio.to_thread(door.close)
        return heard

    heard = house.run(agent)
    made = group(house)
    assert [float(t.rewards.sum()) for t in made.trajectories] == [1.0, 0.0]
    served_tokens = np.concatenate([reply.tokens for reply in heard])
    trained = np.concatenate([t.tokens[t.loss_mask == 1] for t in made.trajectories])
    assert np.array_equal(served_tokens, trained)
    logprobs = np.concatenate([t.logprobs[t.loss_mask == 1] for t in made.trajectories])
    assert np.array_equal(np.concatenate([reply.logprobs for reply in heard]).clip(max=0), logprobs)
