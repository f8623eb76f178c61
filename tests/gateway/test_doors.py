"""The real clients of OpenAI and Anthropic, and `AgentClient`, against the doors as they are served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
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
from penstock.protocols.agent_client import AgentRefusedError, AsyncAgentClient, RunOver
from penstock.protocols.experience import Group
from penstock.services.gateway.http import make_app
from penstock.services.gateway.zmq_door import ZmqDoor
from tests.gateway.house import CALLS, House

SAY: list[Any] = [{"role": "user", "content": "sort ba="}]
TOOL: Any = {"type": "function", "function": {"name": "reveal", "parameters": {"type": "object"}}}


@pytest.fixture
def house(tokenizers: dict[bool, Path], model: Any) -> House:
    made = House(tokenizers[True], model, tool_calls=CALLS)
    made.desk.start(made.lease(0, n=2))
    return made


def served(house: House, agent: Callable[[str], Awaitable[Any]], key: str | None = None) -> Any:
    """What ``agent``, given the gateway's URL, returns."""

    async def main() -> Any:
        app = make_app(house.desk, "policy", key)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            return await agent(f"http://127.0.0.1:{port}")
        finally:
            server.should_exit = True
            await serving

    return house.run(main)


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
        async with httpx.AsyncClient() as http:
            for reward in (1.0, 0.0):
                session = await opened(url, http)
                assert session["task"]["text"] == "sort ba="
                async with openai.AsyncOpenAI(base_url=session["base_url"], api_key="none") as client:
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
                        model="policy", messages=then, tools=[TOOL], stream=True,
                        stream_options={"include_usage": True},
                    )  # fmt: skip
                    parts = [part async for part in stream]
                    called = [p for p in parts if p.choices and p.choices[0].delta.tool_calls]
                    assert called and json.loads(called[0].choices[0].delta.tool_calls[0].function.arguments)
                    assert parts[-1].usage and parts[-1].usage.prompt_tokens > first.usage.total_tokens
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
        async with httpx.AsyncClient() as http:
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
            await http.post(f"{url}/v1/sessions/{session['session']}/finish", json={"reward": 1.0})
            other = await opened(url, http)
            await http.post(f"{url}/v1/sessions/{other['session']}/finish", json={"reward": 0.5})

    served(house, agent)
    made = group(house)
    assert len(made.trajectories) == 5, "four branches, and a session in which nothing was said"
    assert sum(t.sampled for t in made.trajectories) == sum(len(a.tokens) for a in house.engines_own)
    assert "no turn" in made.trajectories[-1].failure


def test_anthropics_client(house: House) -> None:
    tool: Any = {"name": "reveal", "input_schema": {"type": "object"}}
    say: list[Any] = [{"role": "user", "content": "ba="}]

    async def agent(url: str) -> None:
        async with httpx.AsyncClient() as http:
            for _ in range(2):
                session = await opened(url, http)
                base = session["base_url"].removesuffix("/v1")
                async with anthropic.AsyncAnthropic(base_url=base, api_key="none") as client:
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


async def _endless() -> AsyncIterator[bytes]:
    for _ in range(64):
        yield b" " * (1 << 20)


def test_bad_requests_cost_themselves(house: House) -> None:
    async def agent(url: str) -> None:
        async with httpx.AsyncClient(headers={"authorization": "Bearer right"}) as http:
            session = await opened(url, http)
            base, own = session["base_url"], f"{url}/v1/sessions/{session['session']}"
            assert (await http.post(f"{url}/v1/sessions", json={"wait_s": 0}, headers={"authorization": "Bearer no"})
                    ).status_code == 401  # fmt: skip
            wrong: list[tuple[str, Any, int]] = [
                (f"{url}/s/train-9-9-9/v1/chat/completions", {"messages": SAY}, 404),
                (f"{base}/chat/completions", {"messages": []}, 422),
                (f"{base}/chat/completions", {"messages": SAY, "n": 1000}, 422),
                (f"{base}/chat/completions", {"messages": "sort"}, 422),
                (f"{base}/chat/completions", {"messages": [{"role": "user", "content": "a" * 500}]}, 400),
                (f"{base}/generate", {"tokens": [2**31]}, 422),
                (f"{base}/generate", {"tokens": [5000]}, 400),
                (f"{own}/finish", {"reward": "good"}, 422),
                (f"{own}/finish", {}, 422),
                (f"{own}/finish", {"reward": 1.0, "more": 1}, 422),
                (f"{own}/abandon", {"reason": "x" * 2000}, 422),
            ]
            house.desk._settled_at = 0.0
            for path, body, status in wrong:
                answer = await http.post(path, json=body)
                assert (answer.status_code, bool(answer.json()["error"]["message"])) == (status, True), path
            assert (await http.post(f"{own}/finish", content=b"{no json")).status_code == 422
            assert (await http.post(f"{own}/finish", content=b" " * (17 << 20))).status_code == 413
            endless = http.post(f"{own}/finish", content=_endless())
            assert (await endless).status_code == 413, "nobody reads a body that does not say how long it is"
            assert (await http.post(f"{own}/finish", json={"reward": 1.0})).status_code == 200
            await opened(url, http)
            waited = await http.post(f"{url}/v1/sessions", json={"wait_s": 0})
            assert waited.status_code == 503 and float(waited.headers["retry-after"]) > 0
            house.desk.end("it is late")
            over = await http.post(f"{url}/v1/sessions", json={"wait_s": 9})
            assert over.status_code == 410 and over.json()["error"]["code"] == "run_over"

    served(house, agent, key="right")


def test_sessions_are_listed(house: House, tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "agents.key").write_text("right\n")
    (tmp_path / "gateways").mkdir()
    runner = CliRunner()

    async def agent(url: str) -> None:
        (tmp_path / "gateways" / "gateway-0.json").write_text(json.dumps({"http": url}))
        async with httpx.AsyncClient(headers={"x-api-key": "right"}) as http:
            session = await opened(url, http)
            await http.post(f"{session['base_url']}/chat/completions", json={"messages": SAY})
        told = await asyncio.to_thread(runner.invoke, cli.app, ["agents", str(tmp_path), "--json"])
        ((row,),) = json.loads(told.output).values()
        assert row["session"] == session["session"] and row["turns"] == 1 and row["tokens"] > 8 and not row["error"]
        shown = await asyncio.to_thread(runner.invoke, cli.app, ["agents", str(tmp_path)])
        assert "1 sessions" in shown.output and session["session"] in shown.output

    served(house, agent, key="right")


def test_the_zeromq_client(house: House) -> None:
    async def agent() -> list[Any]:
        door = ZmqDoor("tcp://127.0.0.1:*", house.desk, None)
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
