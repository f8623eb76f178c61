"""What frameworks and their SDKs send beside the plain way: it means the same, or is refused."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.services.gateway.bodies import largest_body
from penstock.services.gateway.conversation import Conversation
from penstock.services.gateway.errors import AgentError
from penstock.services.gateway.messages import MessagesRequest
from penstock.services.gateway.responses import ResponsesRequest
from penstock.services.gateway.session import canonical
from penstock.services.runtime.health import AWAY_S
from tests.gateway.house import House
from tests.gateway.test_doors import opened, served

ASK = {"role": "user", "content": "sort dcba="}


@pytest.fixture
def house(tokenizers: dict[bool, Path], model: Any) -> House:
    made = House(tokenizers[True], model)
    made.desk.start(made.lease(0, n=2, new=4))
    return made


def test_the_name_that_a_framework_gives_its_agent_makes_no_branch() -> None:
    plain = {"role": "assistant", "content": "abcd"}
    assert canonical({**plain, "name": "researcher"}) == canonical(plain)
    assert canonical({"role": "tool", "content": "a", "name": "f"})["name"] == "f"


def test_what_is_referred_to_is_what_was_said(house: House) -> None:
    """As Vercel's SDK tells of answers that it believes to be stored."""

    async def agent() -> None:
        desk, held = house.desk, await house.desk.open(1)
        first = await desk.chat(held, ResponsesRequest(input=[ASK]).talk(held.id, held.session))
        named = {"type": "item_reference", "id": f"msg_{held.id}-{first.number}"}
        thought = {"type": "item_reference", "id": "rs_1"}
        asked = ResponsesRequest(input=[ASK, thought, named, {"role": "user", "content": "again"}])
        again = await desk.chat(held, asked.talk(held.id, held.session))
        assert again.parent == first.number
        first.message["tool_calls"] = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        called = {"type": "item_reference", "id": f"fc_{held.id}-{first.number}-0"}
        said = ResponsesRequest(input=[ASK, named, called]).talk(held.id, held.session).messages
        assert said[-1]["content"] == first.message["content"] and said[-1]["tool_calls"][0]["id"] == "x"
        for other in (f"fc_{held.id}-{first.number}-1", f"msg_{held.id}-99", "msg_train-9-9-9-0", "x"):
            with pytest.raises(AgentError, match="is no item of this session's"):
                ResponsesRequest(input=[{"type": "item_reference", "id": other}]).talk(held.id, held.session)

    house.run(agent)


def test_instructions_take_the_place_of_instructions_alone(house: House) -> None:
    async def agent() -> None:
        desk, held = house.desk, await house.desk.open(1)
        rules = {"role": "developer", "content": "rules"}
        turn = await desk.chat(held, ResponsesRequest(input=[rules, ASK]).talk(held.id, held.session), 1)

        def told(instructions: str) -> list[str]:
            asked = ResponsesRequest(
                input="more", previous_response_id=f"resp_{held.id}-{turn.number}", instructions=instructions
            )
            turn.said = list(asked.talk(held.id, held.session).messages)  # as if that had been answered, too
            held.session.instruct(instructions)
            return [message["content"] for message in turn.said if message["role"] == "system"]

        assert told("be brief") == ["be brief", "rules"]
        assert told("be long") == ["be long", "rules"]
        held.session.instructions = None  # as where another gateway has taken it up
        assert told("be quick") == ["be quick", "rules"]

    house.run(agent)


def test_instructions_are_kept_of_turns_that_there_are_alone(tokenizers: dict[bool, Path], model: Any) -> None:
    """And not of what was refused, nor of a life before; of each so many bytes, however long it was."""
    house = House(tokenizers[True], model)
    house.desk.start(house.lease(0))

    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:

            async def ask(**said: Any) -> httpx.Response:
                return await http.post(f"{opened_at['base_url']}/responses", json={"input": "ab", **said})

            opened_at = await opened(url, http)
            session = house.desk._held[opened_at["session"]].session
            tools = [{"type": "function", "name": "f", "parameters": {"a": "b" * 200_000}}]
            for refused in (
                {"tools": [{"type": "web_search"}]},
                {"text": {"format": {"type": "xml"}}},
                {"tools": tools},
            ):
                assert (await ask(instructions="a", **refused)).status_code == 400
            assert not session.instructions
            first = await ask(instructions="b" * 20, input="c")
            then = await ask(instructions="d", previous_response_id=first.json()["id"])
            assert session.instructions is not None and {len(each) for each in session.instructions} == {32}
            said = [message["content"] for message in session.turns[then.json()["penstock"]["turns"][0]].said]
            assert said[:2] == ["d", "c"] and len(session.instructions) == 2
            await http.post(f"{url}/v1/sessions/{opened_at['session']}/abandon", json={})
            assert not session.instructions

    served(house, agent)


def test_a_result_that_is_an_error_says_so() -> None:
    result = {"type": "tool_result", "tool_use_id": "x", "content": "no such file", "is_error": True}
    asked = MessagesRequest(messages=[{"role": "user", "content": [result]}], max_tokens=4, stop_sequences=None)
    assert asked.talk.messages == [{"role": "tool", "tool_call_id": "x", "content": "error: no such file"}]


def test_while_the_gateway_itself_was_stopped_no_agent_was_silent(house: House) -> None:
    async def agent() -> None:
        desk = house.desk
        held = await desk.open(1, beats=True)
        await desk.chat(held, Conversation([ASK]))
        long_ago = time.monotonic() - desk.config.lost_s - 5
        held.heard = long_ago
        desk._silence._looked_at = time.monotonic() - AWAY_S - 1
        desk.expire()
        await asyncio.sleep(0.1)
        assert await desk.find(held.id) is held, "its beats were not read yet"
        held.heard = long_ago
        desk.expire()
        await asyncio.sleep(0.1)
        assert held.session.life == 1, "this time it was silent"
        other = await desk.open(1)
        await desk.chat(other, Conversation([ASK]))
        other.touched = time.monotonic() - desk.config.idle_s - 5
        desk._silence._looked_at = time.monotonic() - AWAY_S - desk.config.idle_s
        desk.expire()
        await asyncio.sleep(0.1)
        assert await desk.find(other.id) is other, "by HTTP, too"

    house.run(agent)


def test_who_is_given_up_has_no_turns_under_way(house: House) -> None:
    async def agent() -> None:
        desk, held = house.desk, await house.desk.open(1)
        asking = asyncio.ensure_future(desk.chat(held, Conversation([ASK])))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert held.questions.pending == 1
        await desk.abandon(held, "he has gone")
        with pytest.raises(AgentError, match="the session has ended"):
            await asking
        assert held.questions.pending == 0

    house.run(agent)


def test_a_request_is_no_larger_than_a_conversation_could_be() -> None:
    """Whoever sends more has the gateway's loop read it in vain, while others wait."""
    assert largest_body(2048, False) == 1 << 20 and largest_body(32_768, False) == 2 << 20
    assert largest_body(1 << 20, False) == largest_body(None, False) == 16 << 20
    assert largest_body(2048, True) == 33 << 20
