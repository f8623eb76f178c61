"""What requests may say, at both doors, and what is refused before anything is made of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.protocols.agent_client import AgentRefusedError, AsyncAgentClient
from penstock.services.gateway.zmq_door import ZmqDoor
from tests.gateway.house import House
from tests.gateway.test_doors import NO_KEYS, SAY, TOOL, opened, served


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


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], ["a"] * 17])
def test_stops_that_are_none_or_too_many_are_refused_at_the_http_door(house: House, stop: Any) -> None:
    several = stop if isinstance(stop, list) else [stop]
    asks: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": SAY, "stop": stop},
        "completions": {"prompt": "a", "stop": stop},
        "messages": {"messages": SAY, "max_tokens": 2, "stop_sequences": several},
    }

    async def agent(url: str) -> list[int]:
        async with httpx.AsyncClient() as http:
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
        async with httpx.AsyncClient() as http:
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
