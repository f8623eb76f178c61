"""What requests may say, at both doors, and what is refused before anything is made of it."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.protocols import agent_line
from penstock.protocols.agent_client import AgentClient, AgentRefusedError, AsyncAgentClient, AsyncAgentSession
from penstock.services.gateway import desk, zmq_door
from penstock.services.gateway.config import GatewayConfig
from penstock.services.gateway.doors import Doors
from penstock.services.gateway.zmq_door import ZmqDoor
from penstock.services.runtime.actor import ActorContext
from tests.gateway.house import CALLS, House
from tests.gateway.test_doors import NO_KEYS, SAY, TOOL, group, opened, owners, served


@pytest.fixture
def house(tokenizers: dict[bool, Path], model: Any) -> House:
    made = House(tokenizers[True], model, tool_calls="none")
    made.desk.start(made.lease(0))
    return made


def by_zeromq(house: House, agent: Callable[[AsyncAgentClient], Awaitable[Any]]) -> Any:
    """What ``agent``, given a client of the ZeroMQ door, returns."""

    async def main() -> Any:
        door = ZmqDoor("tcp://127.0.0.1:*", house.desk, None, NO_KEYS)
        door.start(asyncio.get_running_loop(), "http://here")
        try:
            async with AsyncAgentClient(door.address) as client:
                return await agent(client)
        finally:
            await asyncio.to_thread(door.close)

    return house.run(main)


@pytest.mark.parametrize("silent", [True, False])
def test_whoever_asked_for_a_session_and_went_loses_it_no_attempt(
    tokenizers: dict[bool, Path], model: Any, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """Also where that does not show yet when there is one."""
    monkeypatch.setattr(zmq_door, "SILENT_S", 0.2 if silent else 60)
    house = House(tokenizers[True], model, tool_calls="none", attempts=1, lost_s=0.3)

    async def agent(client: AsyncAgentClient) -> None:
        async with AsyncAgentClient(client._line._mailbox.address) as gone:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(gone.session(), 0.2)
        await asyncio.sleep(0.5)
        house.desk.start(house.lease(0))
        await asyncio.sleep(0.4)
        house.desk.expire()
        async with await client.session() as session:
            assert session.id == ("train-0-0-0" if silent else "train-0-0-1")
            await asyncio.sleep(0.1)
            assert house.desk._held[session.id].taken
            await session.chat(SAY)
            await session.finish(1.0)

    by_zeromq(house, agent)
    assert float(group(house).trajectories[0].rewards.sum()) == 1.0


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], ["a"] * 17])
def test_stops_that_are_none_or_too_many_are_refused_at_the_http_door(house: House, stop: Any) -> None:
    several = stop if isinstance(stop, list) else [stop]
    asks: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": SAY, "stop": stop},
        "completions": {"prompt": "a", "stop": stop},
        "messages": {"messages": SAY, "max_tokens": 2, "stop_sequences": several},
    }

    async def agent(url: str) -> list[int]:
        async with httpx.AsyncClient(timeout=60) as http:
            base = (await opened(url, http))["base_url"]
            return [(await http.post(f"{base}/{path}", json=body)).status_code for path, body in asks.items()]

    assert served(house, agent) == [422] * 3 and not house.engines_own


def test_what_openais_schema_lets_be_null_may_be_null(house: House) -> None:
    nothing = dict.fromkeys(
        ("n", "stop", "stream", "stream_options", "max_tokens", "temperature", "top_p", "logprobs", "seed", "user")
    )
    chat = dict.fromkeys(("max_completion_tokens", "response_format", "tools", "tool_choice", "top_logprobs"))
    responses = dict.fromkeys(("instructions", "previous_response_id", "max_output_tokens", "include", "stream"))
    asks: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"messages": SAY, **nothing, **chat}),
        ("completions", {"prompt": "ab", **nothing}),
        ("completions", {"prompt": ["ab"], "max_tokens": 2}),
        ("completions", {"prompt": [[5, 6, 7]], "max_tokens": 2}),
        ("responses", {"input": "ab", **responses}),
    ]

    async def agent(url: str) -> list[int]:
        found = []
        async with httpx.AsyncClient(timeout=60) as http:
            base = (await opened(url, http))["base_url"]
            for path, body in asks:
                answer = await http.post(f"{base}/{path}", json=body)
                assert answer.status_code == 200, (path, answer.text)
                usage = answer.json()["usage"]
                found.append(usage.get("prompt_tokens") or usage["input_tokens"])
            for prompt in ([], ["a", "b"], [[]], [[5], [6]]):
                assert (await http.post(f"{base}/completions", json={"prompt": prompt})).status_code == 422, prompt
        return found

    assert served(house, agent)[1:4] == [2, 2, 3]


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_whoever_wants_no_call_hears_none_also_after_a_takeover(
    tokenizers: dict[bool, Path], model: Any, path: str
) -> None:
    """The policy is told of the tools, so that the conversation goes on."""
    house = House(tokenizers[True], model, tool_calls=CALLS)
    house.desk.start(house.lease(0))
    flat = {"type": "function", **TOOL["function"]}
    asks: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": SAY, "tools": [TOOL]},
        "responses": {"input": SAY, "tools": [flat]},
        "messages": {"messages": SAY, "tools": [{"name": "reveal", "input_schema": {}}], "max_tokens": 4},
    }
    none = {"type": "none"} if path == "messages" else "none"

    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            session = await opened(url, http)
            for choice, called in ((None, True), (none, False)):
                said = {**asks[path], "tool_choice": choice}
                told = await http.post(f"{session['base_url']}/{path}", json=said)
                assert (
                    told.status_code == 200
                    and (
                        "reveal"
                        in json.dumps(told.json().get("choices") or told.json().get("output") or told.json()["content"])
                    )
                    == called
                )
        before = house.desk._held[session["session"]].session.turns
        house.open().start(house.lease(0))
        after = (await house.desk.find(session["session"])).session.turns
        assert [turn.message for turn in after.values()] == [turn.message for turn in before.values()]
        assert before[0].telling == before[1].telling and "tool_calls" not in before[1].message

    served(house, agent)


def test_what_is_asked_for_as_it_is_anyway_is_not_refused(house: House) -> None:
    chat = {"continue_final_message": False, "modalities": ["text"], "chat_template_kwargs": {}, "tool_choice": "auto"}
    asks: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"messages": SAY, **chat}),
        ("responses", {"input": "ab", "background": False}),
        ("completions", {"prompt": "ab", "n": 2, "best_of": 2}),
    ]

    async def agent(url: str) -> list[int]:
        async with httpx.AsyncClient(timeout=60) as http:
            base = (await opened(url, http))["base_url"]
            return [(await http.post(f"{base}/{path}", json=body)).status_code for path, body in asks]

    assert served(house, agent) == [200] * 3


def test_the_zeromq_door_looks_at_messages_as_the_http_door_does(house: House) -> None:
    wrong: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"content": "a"}]},
        {"messages": []},
        {"messages": [{"role": "king", "content": "a"}]},
        {"messages": SAY, "tools": [{"type": "function"}]},
        {"messages": SAY, "stop": [""]},
        {"messages": SAY, "stop": ["a"] * 17},
        {"messages": SAY, "max_tokens": 0},
    ]

    async def agent(client: AsyncAgentClient) -> None:
        async with await client.session() as session:
            for about in wrong:
                with pytest.raises(AgentRefusedError) as refused:
                    await session.chat(**about)
                assert (refused.value.status, refused.value.code) == (422, "invalid_request"), about
            for tokens in ([], [-1]):
                with pytest.raises(AgentRefusedError) as refused:
                    await session.generate(np.array(tokens, np.int32))
                assert refused.value.status == 422
            parts = [{"type": "text", "text": "sort "}, {"type": "text", "text": "ba="}]
            said = [{"role": "developer", "content": "b"}, {"role": "user", "content": parts}]
            await session.chat(said, [TOOL])
            await session.finish(reward=1.0)

    by_zeromq(house, agent)
    (request, _), *none = house.asked.values()
    told = house.text.decode([np.frombuffer(request.prompt.tobytes(), np.int32).tolist()])[0]
    wanted = house.text.encode_chat([{"role": "system", "content": "b"}, {"role": "user", "content": "sort ba="}])
    assert not none and told == house.text.decode([wanted.tolist()])[0]


def told_of_room(said: str) -> int:
    """The tokens that clients read of a refusal, in OpenAI's words, by which litellm knows it, and in Anthropic's."""
    openai = re.search(r"his model's maximum context length is (\d+) tokens.* resulted in (\d+) tokens", said)
    anthropic = re.search(r"prompt is too long: (\d+) tokens > (\d+) maximum", said)
    assert openai and anthropic and openai.groups() == anthropic.groups()[::-1] and openai[1] == "64", said
    return int(openai[2])


@pytest.mark.parametrize("lost", [False, True])
def test_a_block_that_is_left_by_a_refusal_gives_its_session_back_where_there_is_one(house: House, lost: bool) -> None:
    async def agent(client: AsyncAgentClient) -> None:
        with pytest.raises(AgentRefusedError) as refused:
            async with await client.session() as session:
                if lost:
                    await house.desk.finish(session.id, 1.0)
                    house.desk._settled_at = 0.0
                await session.chat([{"role": "user", "content": "a" * 100}])
        assert refused.value.code == ("unknown_session" if lost else "context_length_exceeded")
        assert session.ended and not house.desk.rows()
        if not lost:
            assert (await client.session(wait_s=0.5)).id == "train-0-0-1"

    by_zeromq(house, agent)

    def plain(address: str) -> None:
        with AgentClient(address) as client, client.session() as session:
            session.chat([{"role": "user", "content": "a" * 100}])

    async def again(client: AsyncAgentClient) -> None:
        with pytest.raises(AgentRefusedError):
            await asyncio.to_thread(plain, client._line._mailbox.address)
        assert not house.desk.rows()

    house.open().start(house.lease(1))
    by_zeromq(house, again)


@pytest.mark.parametrize("kept", [True, False])
def test_a_session_that_its_program_has_dropped_is_lost_and_one_that_it_has_is_not(
    tokenizers: dict[bool, Path], model: Any, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """The program lives on, and says so."""
    monkeypatch.setattr(agent_line, "BEAT_S", 0.1)
    monkeypatch.setattr(desk, "UNASKED_S", 60.0)  # a busy machine may be slower
    house = House(tokenizers[True], model, tool_calls="none", lost_s=1.5)
    house.desk.start(house.lease(0))

    async def agent(client: AsyncAgentClient) -> None:
        session: AsyncAgentSession | None = await client.session()
        assert session and session.id == "train-0-0-0"
        if not kept:
            session = None
        gc.collect()
        for _ in range(30):
            await asyncio.sleep(0.1)
            house.desk.expire()
        assert [row["session"] for row in house.desk.rows()] == ["train-0-0-0"] * kept
        if not kept:
            assert (await client.session(wait_s=0.5)).id == "train-0-0-1"

    by_zeromq(house, agent)


def test_a_body_is_read_of_those_alone_who_show_a_key(house: House, tmp_path: Path) -> None:
    head = (
        b"POST /v1/sessions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 9000\r\n"
    )
    body = b'{"wait_s": 1}' + b" " * (9000 - 13)

    async def asked(url: str, key: bytes, *parts: bytes) -> bytes:
        """The first line that is answered."""
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.writelines([head, key, b"\r\n", *parts])
        found = await asyncio.wait_for(reader.readline(), 5)
        writer.close()
        return found

    async def agent(url: str) -> None:
        for wrong in (b"", b"x-api-key: wrong\r\n", b"authorization: Basic right\r\n"):
            assert b" 401 " in await asked(url, wrong)
        assert b" 200 " in await asked(url, b"authorization: bearer right\r\n", body)

    served(house, agent, owners(tmp_path, "right"))


def test_a_gateway_has_so_many_connections_and_no_more(house: House, tmp_path: Path) -> None:
    config = GatewayConfig(http="127.0.0.1:0", bind="tcp://127.0.0.1:0", sessions=1, waiting=1)
    doors = Doors(config, ActorContext("gateway-0", "run", tmp_path, ""), house.desk, "policy")
    most = 4 * (config.sessions + config.waiting)

    async def agent() -> list[int]:
        doors.open(asyncio.get_running_loop())
        serving = asyncio.ensure_future(doors.serve())
        url = json.loads((tmp_path / "gateways" / "gateway-0.json").read_text())["http"]
        lines = [await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2])) for _ in range(most)]
        await asyncio.sleep(0.1)
        found = []
        for open_lines in (most, 0):
            for _, writer in lines[: most - open_lines]:
                writer.close()
            await asyncio.sleep(0.1)
            async with httpx.AsyncClient(timeout=60) as http:
                found.append((await http.get(f"{url}/v1/sessions")).status_code)
        await asyncio.to_thread(doors.close)
        await serving
        return found

    assert house.run(agent) == [503, 200]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_gateway_listens_at_addresses_of_both_kinds(house: House, tmp_path: Path, host: str) -> None:
    try:
        socket.create_server((host.strip("[]"), 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip("this machine has no such addresses")
    config = GatewayConfig(http=f"{host}:0", bind=f"tcp://{host}:0")
    doors = Doors(config, ActorContext("gateway-0", "run", tmp_path, ""), house.desk, "policy")

    async def agent() -> None:
        doors.open(asyncio.get_running_loop())
        serving = asyncio.ensure_future(doors.serve())
        async with AsyncAgentClient(tmp_path) as client, httpx.AsyncClient(timeout=60) as http:
            session = await client.session()
            said = await http.post(f"{session.base_url}/chat/completions", json={"messages": SAY})
            assert said.status_code == 200 and f"//{host}:" in session.base_url
            assert client._line._mailbox.address.startswith(f"tcp://{host}:")
            await session.finish(1.0)
        await asyncio.to_thread(doors.close)
        await serving

    house.run(agent)


def test_a_request_for_several_answers_is_made_tokens_of_once_and_what_cannot_fit_never(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    for name in ("encode_chat", "encode_text"):
        own = getattr(house.text, name)
        monkeypatch.setattr(house.text, name, lambda said, *rest, own=own: (encoded.append(1), own(said, *rest))[1])

    async def agent(url: str) -> None:
        long = "a" * (33 * 64)
        async with httpx.AsyncClient(timeout=60) as http:
            base = (await opened(url, http))["base_url"]
            encoded.clear()
            for path, said in (("chat/completions", {"messages": SAY}), ("completions", {"prompt": "a"})):
                answer = await http.post(f"{base}/{path}", json={**said, "n": 4})
                assert len(answer.json()["choices"]) == 4 and encoded == [1]
                encoded.clear()
            too_long = [{"role": "user", "content": long}]
            for path, said in (
                ("chat/completions", {"messages": too_long}),
                ("completions", {"prompt": long}),
                ("messages", {"messages": too_long, "max_tokens": 2}),
                ("messages/count_tokens", {"messages": too_long}),
                ("responses", {"input": long}),
            ):
                refused = await http.post(f"{base}/{path}", json=said)
                assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
                assert told_of_room(refused.json()["error"]["message"]) > 64
            assert not encoded
            full = await http.post(
                f"{base}/chat/completions", json={"messages": [{"role": "user", "content": "a" * 100}]}
            )
            assert 100 < told_of_room(full.json()["error"]["message"]) < 150

    served(house, agent)
