"""What the policy has only thought, told apart from what it says: by every API, and the conversation goes on."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest

from penstock.pipeline.models.tiny import make_tokenizer
from penstock.services.gateway import replies
from penstock.services.gateway.replies import Replies
from penstock.services.turns.answers import Answer
from penstock.services.turns.tokenizer import Tokenizer
from tests.gateway.house import House
from tests.gateway.test_doors import opened, served

ASKED: list[Any] = [{"role": "user", "content": "ab"}]


def last(house: House) -> tuple[str, str]:
    """The thought, and what was said, of what was sampled last."""
    text = house.text.decode([house.engines_own[-1].tokens.tolist()])[0]
    return text[:1], text[1:]


@pytest.mark.parametrize(
    ("said", "before", "thoughts", "content"),
    [
        ("<think>\nwell\n</think>\n\nab", "", "well", "ab"),
        ("well</think>ab", "a<think>\n", "well", "ab"),
        ("well", "a<think>\n", "well", ""),
        ("<think></think>ab", "", None, "ab"),
        (" ab", "", None, " ab"),
        ("ab<think>c</think>", "", None, "ab<think>c</think>"),
    ],
)
def test_what_an_answer_begins_with_is_told_apart(
    tmp_path: Path, said: str, before: str, thoughts: str | None, content: str
) -> None:
    make_tokenizer(set(string.printable)).save_pretrained(tmp_path)
    text, none = Tokenizer(str(tmp_path)), np.zeros(0, np.float32)
    answer, given = Answer(text.encode_text(said), none, none), text.encode_text(before or "a")
    lease: Any = None
    for apart, chat in ((True, True), (False, True), (True, False)):
        message, _ = Replies(text, "none", apart).message(lease, 0, 0, answer, "", (), given, chat)
        told = (thoughts, content) if apart and chat else (None, said)
        assert (message.get("reasoning_content"), message["content"]) == told


@pytest.fixture
def house(tokenizers: dict[bool, Path], model: Any, monkeypatch: pytest.MonkeyPatch) -> House:
    """Where the first letter of each answer is a thought: nothing else can be had of a policy of random letters."""
    monkeypatch.setattr(replies, "behind_thoughts", lambda text, thinking: (text[:1], text[1:]))
    made = House(tokenizers[True], model, tool_calls="none", thoughts="apart")
    made.desk.start(made.lease(0, new=8))
    return made


def test_clients_hear_of_thoughts_and_go_on_without_them(house: House) -> None:
    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            base = (await opened(url, http))["base_url"]
        async with openai.AsyncOpenAI(base_url=base, api_key="none") as client:
            await by_openai(client)
        async with anthropic.AsyncAnthropic(base_url=base.removesuffix("/v1"), api_key="none") as claude:
            block, text = (await claude.messages.create(model="x", max_tokens=8, messages=ASKED)).content
            assert (block.type, block.thinking, text.text) == ("thinking", *last(house))  # type: ignore[union-attr]
            async with claude.messages.stream(model="x", max_tokens=8, messages=ASKED) as stream:
                block, text = (await stream.get_final_message()).content
            assert (block.thinking, text.text) == last(house)  # type: ignore[union-attr]

    async def by_openai(client: openai.AsyncOpenAI) -> None:
        whole: Any = (await client.chat.completions.create(model="x", messages=ASKED)).choices[0].message
        assert (whole.reasoning_content, whole.content) == last(house) and whole.reasoning == whole.reasoning_content
        on: Any = [*ASKED, {"role": "assistant", "content": whole.content}, {"role": "user", "content": "b"}]
        stream = await client.chat.completions.create(model="x", messages=on, stream=True)
        deltas: list[Any] = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        assert (thoughts, "".join(delta.content or "" for delta in deltas)) == last(house)
        thought, words = (await client.responses.create(model="x", input="ab")).output
        told: Any = thought, words
        assert (thought.type, told[0].content[0].text, told[1].content[0].text) == ("reasoning", *last(house))
        again: Any = [{"role": "user", "content": "ab"}, *(item.to_dict() for item in told), ASKED[0]]
        await client.responses.create(model="x", input=again)
        async with client.responses.stream(model="x", input="ab") as events:
            seen: list[Any] = [event async for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(event.delta for event in seen) == last(house)[0]
        (held,) = house.desk._held.values()
        assert [turn.parent for turn in held.session.turns.values()] == [None, 0, None, 2, None]
        plain = await client.completions.create(model="x", prompt="ab")
        assert plain.choices[0].text == "".join(last(house)), "a text that is gone on from has no thoughts apart"

    served(house, agent)
