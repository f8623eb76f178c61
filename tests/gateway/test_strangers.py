"""What strangers send costs them, and the gateway's one loop next to nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.protocols import messages as m
from penstock.protocols import wire
from penstock.protocols.agent_client import AsyncAgentClient
from penstock.protocols.mailbox import RefusedError
from penstock.protocols.messages import from_envelope
from tests.gateway.house import House
from tests.gateway.test_doors import opened, served
from tests.gateway.test_requests import by_zeromq

MANY = 500_000
JSON = {"content-type": "application/json"}


@pytest.fixture
def house(tokenizers: dict[bool, Path], model: Any) -> House:
    made = House(tokenizers[True], model, tool_calls="none")
    made.desk.start(made.lease(0))
    return made


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The loop is held up for no longer, which it shares with whoever asks: of its thread's own time, since others may
    have the cores."""
    last, longest = time.thread_time(), 0.0

    async def turns() -> None:
        nonlocal last, longest
        while True:
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.thread_time() - last), time.thread_time()

    task = asyncio.ensure_future(turns())
    yield
    task.cancel()
    longest = max(longest, time.thread_time() - last)
    assert longest < seconds, f"nobody was answered for {longest:.1f} s"


@pytest.mark.parametrize(
    ("path", "about", "many"),
    [
        ("chat/completions", {}, {"messages": [0] * MANY}),
        ("chat/completions", {}, {"messages": [{"role": "assistant", "tool_calls": [0] * MANY}]}),
        ("messages", {"max_tokens": 2}, {"messages": [{"role": "user", "content": [0] * MANY}]}),
        ("responses", {}, {"input": [0] * MANY}),
        ("completions", {}, {"prompt": [[]] * (MANY // 2)}),
        ("generate", {}, {"tokens": [-1] * (MANY // 2)}),
        ("finish", {}, {"metrics": {str(number): "" for number in range(MANY // 8)}}),
        ("finish", {}, {str(number): 0 for number in range(MANY // 8)}),
        ("finish", {}, {"metrics": {"a" * MANY: ""}}),
    ],
)
def test_a_request_of_which_everything_is_wrong_holds_up_nobody(
    house: House, path: str, about: dict[str, Any], many: dict[str, Any]
) -> None:
    body = json.dumps({**about, **many}, separators=(",", ":"))
    assert len(body) < 1 << 20

    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            session = await opened(url, http)
            at = f"{url}/v1/sessions/{session['session']}" if path == "finish" else session["base_url"]
            with within(1.5):
                told = await http.post(f"{at}/{path}", content=body, headers=JSON)
            assert told.status_code == 422 and len(told.content) < 3000, told.text[:500]

    served(house, agent)


def test_a_message_of_which_everything_is_wrong_is_not_told_piece_by_piece() -> None:
    body = {"session": "a", "request": "b", "messages": [0] * MANY}
    began = time.monotonic()
    with pytest.raises(wire.WireError, match="AgentChat: 500,000 fields or items are wrong"):
        from_envelope(wire.Envelope("AgentChat", 1, 0, body))
    assert time.monotonic() - began < 3, "of each error it would be many seconds"


def test_nobody_waits_for_a_session_without_end(house: House) -> None:
    """Not a number is never past, nor more than anything."""
    house.desk._free.clear()

    async def agent(client: AsyncAgentClient) -> None:
        line = client._line
        for wait_s in (float("nan"), float("inf"), -1.0, 1e9):
            said = m.AgentOpen.model_construct(wait_s=wait_s)
            with pytest.raises(RefusedError, match=r"AgentOpen: wait_s") as refused:
                await asyncio.wrap_future(line.ask(said, 2.0))
            assert refused.value.code == "bad_message"
        assert not house.desk._openers

    by_zeromq(house, agent)

    async def over_http(url: str) -> None:
        async with httpx.AsyncClient(timeout=5) as http:
            for wait_s in ("NaN", "Infinity", "-1", "1e9"):
                told = await http.post(f"{url}/v1/sessions", content=f'{{"wait_s": {wait_s}}}', headers=JSON)
                assert told.status_code == 422, told.text

    served(house, over_http)


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_arguments_that_are_nested_too_deep_are_text_or_refused(house: House, path: str) -> None:
    """Also where they can be read and not be written, in the loop's own depth."""

    def said(levels: int) -> dict[str, Any]:
        called = {"name": "f", "arguments": '{"a": ' + "[" * levels + "]" * levels + "}"}
        if path == "responses":
            items = [{"type": "function_call", "call_id": "x", **called}, {"role": "user", "content": "b"}]
            return {"input": items}
        asked = {"role": "assistant", "tool_calls": [{"id": "x", "function": called}]}
        return {"messages": [asked, {"role": "user", "content": "b"}]}

    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            base = (await opened(url, http))["base_url"]
            for levels in (700, *range(900, 930), 100_000):
                told = await http.post(f"{base}/{path}", json=said(levels))
                assert told.status_code in (200, 400), (levels, told.text)

    served(house, agent)


@pytest.mark.parametrize(
    "said",
    [
        '{"input": "a", "text": {"verbosity": "\\ud800"}}',
        '{"input": "a", "text": {"verbosity": NaN}}',
        '{"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {"minimum": NaN}}]}',
        '{"input": "a", "instructions": "\\ud800"}',
    ],
)
def test_what_a_response_could_not_repeat_is_refused_before_it_is_asked(house: House, said: str) -> None:
    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            base = (await opened(url, http))["base_url"]
            told = await http.post(f"{base}/responses", content=said, headers=JSON)
            assert told.status_code == 422 and "half a character" in told.json()["error"]["message"], told.text

    served(house, agent)
    assert not house.asked
