"""What finds calls in an answer costs little time, whatever the answer is, and never the answer itself."""

from __future__ import annotations

import asyncio
import json
import string
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.pipeline.models.tiny import make_tokenizer
from penstock.protocols.experience import as_bytes
from penstock.services.environments.tools import Tools
from penstock.services.gateway.conversation import Conversation
from penstock.services.gateway.formats import Forms
from penstock.services.gateway.openai_routes import judged
from penstock.services.gateway.replies import Replies
from penstock.services.turns.tokenizer import Tokenizer
from penstock.services.turns.tool_calls import Call, Said, aloud, behind_thoughts, between_tags, in_form
from tests.gateway.house import House

SAY = [{"role": "user", "content": "sort ba="}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
FOUND: list[Any] = []
"""What `spoiled` finds."""


def spoiled(text: str) -> tuple[str, list[Any]]:
    """A parser whose calls are no calls."""
    return "", FOUND


def spoken(arguments: str, name: str = "add") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize(
    ("thoughts", "rest", "left"),
    [
        (f"<think>maybe {spoken('{}')}</think>", "\n3", None),
        (f"maybe {spoken('{}')}</think>", "\n3", None),
        (f"<think>maybe {spoken('{}')}", "", None),
        (f"\n<think>maybe {spoken('{}', name='no')}</think>", f"Well. {spoken('{}')}", "Well."),
        (f"maybe {spoken('{}', name='no')}</think>", f"{spoken('{}')}", ""),
        ("<think></think>", f"Well.{spoken('{}')}<think>{spoken('{}')}</think>", f"Well.<think>{spoken('{}')}</think>"),
    ],
)
def test_what_was_only_thought_calls_nothing_and_stays(
    tokenizers: dict[bool, Path], thoughts: str, rest: str, left: str | None
) -> None:
    replies, text = Replies(Tokenizer(str(tokenizers[True])), "hermes"), thoughts + rest
    found = (text, []) if left is None else ((thoughts + left).strip(), [Call("add", {})])
    assert replies._parser(Said(text, text, json.dumps(TOOLS))) == found
    assert behind_thoughts(text) == (thoughts, rest)


@pytest.mark.parametrize("thoughts", ["I write <tool_call> first.</think>", "Well.", f"<think>{spoken('{}')}", ""])
def test_where_the_template_has_begun_a_thought_it_goes_on_to_its_end(tmp_path: Path, thoughts: str) -> None:
    make_tokenizer(set(string.printable)).save_pretrained(tmp_path)
    text = Tokenizer(str(tmp_path))
    replies, begun = Replies(text, "hermes"), text._tokenize("a<think>\n")
    said = thoughts + spoken("{}")
    found = replies._parser(Said(said, said, json.dumps(TOOLS), thinking=text.begins_thought(np.array(begun))))
    assert found == ((thoughts, [Call("add", {})]) if "</think>" in said else (said, []))
    assert not text.begins_thought(np.array(text._tokenize("<think>a</think>\n")))


def test_whether_an_answer_has_its_form_is_seen_behind_its_thoughts() -> None:
    async def fits(*texts: str) -> list[bool | None]:
        async def answers() -> Any:
            return [SimpleNamespace(message={"content": text}) for text in texts]

        forms = Forms()
        try:
            form = await forms.read(("response_format", {"type": "json_object"}))
            await judged(form, answers())
            return form.fits if form else []
        finally:
            await asyncio.to_thread(forms.close)

    assert asyncio.run(fits('<think>{</think>\n{"a": 1}', '{ or }?</think>{"a": 1}', "<think>{}</think>3", "{}")) == [
        True, True, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["<think>" * 200_000, "<think></think>" * 100_000, "</think>" * 200_000])
def test_thoughts_are_looked_for_once(text: str) -> None:
    began = time.monotonic()
    assert in_form("hermes", text) == (text, []) and not aloud(text).startswith("<think>")
    assert time.monotonic() - began < 5, "looked for again behind each it would be minutes"


@pytest.mark.parametrize(
    "text", ["<tool_call>" + "\n" * 200_000, "<tool_call>" * 200_000, "<tool_call>" + " \n" * 100_000 + "</tool_call"]
)
def test_a_call_without_its_end_is_looked_for_once(text: str) -> None:
    began = time.monotonic()
    assert in_form("hermes", text) == (text, []) and between_tags(text) == (text, [])
    assert time.monotonic() - began < 5


def test_calls_are_found_between_tags() -> None:
    text = "a<tool_call>\n 1 \n</tool_call>b<tool_call></tool_call>c</tool_call><tool_call>2"
    assert between_tags(text) == ("abc</tool_call><tool_call>2", ["1", ""])
    assert in_form("hermes", f"Well. {spoken('{}')} {spoken('{}')}") == ("Well.", [Call("add", {})] * 2)


def test_a_call_that_is_nested_too_deep_is_told_to_be_none() -> None:
    turn = asyncio.run(Tools(["tests.environments.games:add"]).step(f"<tool_call>{'[' * 200_000}</tool_call>"))
    assert turn.observation and "a call is JSON" in str(turn.observation[0])


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>{'[' * 200_000}</tool_call>",
        spoken("{}", name="a\\ud800"),
        spoken('{"a": "\\ud800"}'),
        spoken('{"a": NaN}'),
        spoken('{"a": -Infinity}'),
    ],
)
def test_what_cannot_be_told_as_a_call_is_text(tokenizers: dict[bool, Path], text: str) -> None:
    replies = Replies(Tokenizer(str(tokenizers[True])), "hermes")
    assert replies._parser(Said(text, text, json.dumps(TOOLS))) == (text, [])


@pytest.mark.parametrize("found", [[None], [Call(7, {})], [Call("add", [])], [Call("add", {"a": {1}})]])  # type: ignore[arg-type]
def test_what_a_function_finds_that_is_no_call_is_text(
    tokenizers: dict[bool, Path], found: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "FOUND", found)
    replies = Replies(Tokenizer(str(tokenizers[True])), "tests.gateway.test_parsers:spoiled")
    assert replies._parser(Said("ab", "ab", json.dumps(TOOLS))) == ("ab", [])


def test_a_group_that_cannot_be_taken_up_is_told_to_have_failed(tokenizers: dict[bool, Path], model: Any) -> None:
    house = House(tokenizers[False], model)

    async def play() -> None:
        house.desk.start(house.lease(0))
        held = await house.desk.open(1)
        await house.desk.chat(held, Conversation(SAY))
        house.records["train", 0]["answer.0.0"] = as_bytes(b"no answer")
        lease = house.lease(0)
        house.open().start(lease)
        assert not house.desk.has(lease)

    house.run(play)
    assert "Error" in str(house.delivered["train", 0])
