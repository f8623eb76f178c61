"""Answers of a certain form: told whether they fit, never forced; and what a library's parser makes of calls."""

from __future__ import annotations

import asyncio
import json
import string
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from penstock.pipeline.models.characters import ALPHABET
from penstock.pipeline.models.tiny import make_tokenizer
from penstock.services.gateway import formats
from penstock.services.gateway.errors import AgentError
from penstock.services.gateway.formats import Forms
from penstock.services.gateway.replies import Replies
from penstock.services.runtime.errors import SetupError
from penstock.services.turns.tokenizer import Tokenizer
from penstock.services.turns.tool_calls import Call, Said
from tests.gateway.house import House
from tests.gateway.test_doors import SAY, opened, served

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "point", "strict": True, "schema": schema}}


Looks = Callable[[Any, Sequence[str]], list[bool | None] | None]


@pytest.fixture(scope="module")
def look() -> Iterator[Looks]:
    """Whether texts have a form, by the process that the gateway has for it."""
    loop, forms = asyncio.new_event_loop(), Forms()

    async def looked(wanted: Any, texts: Sequence[str]) -> list[bool | None] | None:
        found = await forms.read(("response_format", wanted))
        if found:
            await found.judge(texts)
        return found and found.fits

    yield lambda wanted, texts: loop.run_until_complete(looked(wanted, texts))
    forms.close()
    loop.close()


@pytest.mark.parametrize(
    ("wanted", "text", "fits"),
    [
        ({"type": "json_object"}, "{}", True),
        ({"type": "json_object"}, "[]", False),
        ({"type": "json_object"}, "not JSON", False),
        (form(POINT), '{"x": 3}', True),
        (form(POINT), '{"x": "3"}', False),
        ({"type": "json_schema", "name": "point", "schema": POINT}, '{"x": 3}', True),
        (form({"type": "string", "pattern": "^(a+)+$"}), json.dumps("a" * 60 + "!"), False),
        (form({"type": "array"}), "[" * 100_000, False),
    ],
)
def test_whether_an_answer_fits(look: Looks, wanted: dict[str, Any], text: str, fits: bool) -> None:
    assert look(wanted, [text, text]) == [fits, fits]


@pytest.mark.parametrize(
    ("wanted", "code", "match"),
    [
        (form({"type": "nonsense"}), "invalid_schema", "nonsense"),
        (form({"$ref": "http://127.0.0.1:9/secret"}), "invalid_schema", "not looked up"),
        (form({"type": "string", "pattern": "("}), "invalid_schema", "regex"),
        (form(None), "invalid_schema", "no schema"),
        ({"type": "json_schema"}, "invalid_schema", "no schema"),
        ({"type": "grammar"}, "unsupported", "json_schema are known"),
    ],
)
def test_a_schema_that_is_none_is_refused(look: Looks, wanted: dict[str, Any], code: str, match: str) -> None:
    with pytest.raises(AgentError, match=match) as refused:
        look(wanted, [])
    assert refused.value.status == 400 and refused.value.code == code


def nested(levels: int) -> dict[str, Any]:
    """A schema of a few kilobytes that is looked at twice as often with each level."""
    several = {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(levels)}
    return {"$ref": "#/$defs/a0", "$defs": {**several, f"a{levels}": {"type": "number"}}}


def test_a_schema_that_takes_for_ever_costs_whoever_has_sent_it(look: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    assert look(form(nested(40)), ["1"]) == [None], "the answer is there, and nobody knows whether it fits"
    assert look(form(POINT), ['{"x": 3}']) == [True] and time.monotonic() - began < 15
    with pytest.raises(AgentError, match="at most 65,536 bytes"):
        look(form({"enum": ["x" * 70_000]}), [])


def test_who_has_to_wait_for_others_schemas_is_told_to_ask_again_and_of_known_ones_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(formats, "WAIT_S", 1.0)

    async def play() -> None:
        forms = Forms()
        try:
            assert await forms.read(("response_format", form(POINT)))
            slow = [asyncio.ensure_future(forms.look(json.dumps(nested(40)), ["1"])) for _ in range(2)]
            await asyncio.sleep(0.1)
            assert await forms.read(("response_format", form(POINT))), "looked at before"
            with pytest.raises(AgentError, match="ask again") as refused:
                await forms.read(("response_format", form({"type": "array"})))
            assert (refused.value.status, refused.value.code) == (503, "busy") and refused.value.headers["Retry-After"]
            await asyncio.gather(*slow, return_exceptions=True)
        finally:
            await asyncio.to_thread(forms.close)

    asyncio.run(play())


def test_openais_client_asks_for_forms_and_is_told_whether_answers_fit(
    tokenizers: dict[bool, Path], model: Any
) -> None:
    class Point(BaseModel):
        x: int

    house = House(tokenizers[True], model)
    house.desk.start(house.lease(0))

    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            session = await opened(url, http)
        async with openai.AsyncOpenAI(base_url=session["base_url"], api_key="none") as client:
            told = await client.chat.completions.create(model="p", messages=SAY, response_format=form(POINT))  # type: ignore[call-overload]
            assert told.model_extra["penstock"]["fits"] == [False] and told.choices[0].message.content
            stream = await client.chat.completions.create(  # type: ignore[call-overload]
                model="p", messages=SAY, response_format=form(POINT), n=2, stream=True
            )
            parts = [part async for part in stream]
            assert [part.model_extra.get("penstock") for part in parts[:-1]] == [None] * (len(parts) - 1)
            assert parts[-1].model_extra["penstock"]["fits"] == [False, False]
            about = {"format": {"type": "json_schema", "name": "p", "schema": POINT}}
            answer = await client.responses.create(model="p", input="sort ba=", text=about)  # type: ignore[call-overload]
            assert answer.model_extra["penstock"]["fits"] == [False]
            with pytest.raises(
                Exception, match="length limit|validation error|JSON"
            ):  # the client's own, of what the policy said
                await client.chat.completions.parse(model="p", messages=SAY, response_format=Point)
            with pytest.raises(openai.BadRequestError, match="not a JSON schema"):
                await client.chat.completions.create(
                    model="p", messages=SAY, response_format=form({"type": "nonsense"})
                )  # type: ignore[call-overload]

    served(house, agent)


ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = json.dumps([{"type": "function", "function": ADD}])
CALL = {"name": "{content.name}", "arguments": "{content.arguments}"}
SPOKEN = 'Well. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEMPLATE = {
    "start_anchor": "<assistant>",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": CALL},
        },
    },
}  # fmt: skip


@pytest.fixture
def parsed(tmp_path: Path) -> Callable[[str, str], tuple[str, list[Call]]]:
    """By a parser of the config: what is left of a text, and the calls."""
    tokenizer = make_tokenizer(set(ALPHABET))
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    tokenizer.response_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)

    def parse(name: str, text: str) -> tuple[str, list[Call]]:
        return Replies(Tokenizer(str(tmp_path)), name)._parser(Said(text, text, TOOLS))

    return parse


def test_the_tokenizers_own_template_finds_calls(parsed: Callable[[str, str], tuple[str, list[Call]]]) -> None:
    text, calls = parsed("template", SPOKEN)
    assert text.strip() == "Well." and calls == [Call("add", {"a": 1})]
    assert parsed("template", "Well.") == ("Well.", [])
    broken = SPOKEN.replace("{", "")
    assert parsed("template", broken) == (broken, [])


def test_the_tokenizers_own_template_is_told_what_stands_before_the_answer(tmp_path: Path) -> None:
    """Which may have begun a thought, for this task alone."""
    tokenizer = make_tokenizer(set(string.printable))
    begun = "{{ '<assistant><think>' if enable_thinking else '<assistant>' }}"
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" + begun
    thought = {"open": "<think>", "close": "</think>"}
    tokenizer.response_template = {**TEMPLATE, "fields": {"thinking": thought, **TEMPLATE["fields"]}}  # type: ignore[dict-item]
    tokenizer.save_pretrained(tmp_path)
    text = Tokenizer(str(tmp_path), {"enable_thinking": True})
    replies, heard = Replies(text, "template"), []
    for told in (True, False):
        given = text.telling({"enable_thinking": told}).encode_chat([{"role": "user", "content": "a"}])
        heard.append(replies._parser(Said(SPOKEN, SPOKEN, TOOLS, told, False, text.decode_whole(given))))
    assert heard[0][1] == [] and heard[1][0].strip() == "Well."
    assert heard[1][1] == [Call("add", {"a": 1})]


@pytest.mark.vllm
def test_vllms_parsers_find_calls(parsed: Callable[[str, str], tuple[str, list[Call]]]) -> None:
    pytest.importorskip("vllm")
    for name in ("hermes", "qwen3_json"):
        text, calls = parsed(f"vllm:{name}", SPOKEN)
        assert text.strip() == "Well." and calls == [Call("add", {"a": 1})], name
    assert parsed("vllm:pythonic", "[add(a=1)]") == ("", [Call("add", {"a": 1})])
    assert parsed("vllm:pythonic", "Well.") == ("Well.", [])
    with pytest.raises(SetupError, match="does not fit the model's tokenizer: .*python_tag"):
        parsed("vllm:llama3_json", "")
    with pytest.raises(SetupError, match="vLLM has no parser 'nonsense'; it has"):
        parsed("vllm:nonsense", "")


class _Stub:
    """As vLLM's for gpt-oss, which its server does without."""

    def __init__(self, *made: Any) -> None: ...
    def extract_tool_calls(self, text: str, request: Any) -> Any:
        raise NotImplementedError("asked of the server's own")


class _Silent(_Stub):
    def extract_tool_calls(self, text: str, request: Any) -> Any:
        return SimpleNamespace(tools_called=False)


@pytest.mark.parametrize(("made", "works"), [(_Stub, False), (_Silent, True)])
def test_a_parser_of_vllms_that_finds_nothing_ever_is_refused(
    tokenizers: dict[bool, Path], monkeypatch: pytest.MonkeyPatch, made: type, works: bool
) -> None:
    parsers = SimpleNamespace(list_registered=lambda: ["openai"], get_tool_parser=lambda name: made)
    request = SimpleNamespace(ChatCompletionRequest=lambda **told: SimpleNamespace(**told))
    monkeypatch.setitem(sys.modules, "vllm.tool_parsers", SimpleNamespace(ToolParserManager=parsers))
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.openai.chat_completion.protocol", request)
    monkeypatch.setitem(sys.modules, "vllm.tokenizers.hf", SimpleNamespace())
    text = Tokenizer(str(tokenizers[True]))
    if works:
        assert Replies(text, "vllm:openai")._parser(Said("Well.", "Well.", TOOLS)) == ("Well.", [])
        return
    with pytest.raises(SetupError, match="vLLM's parser 'openai' cannot be asked for .*NotImplementedError"):
        Replies(text, "vllm:openai")


@pytest.mark.vllm
def test_vllms_parsers_read_the_vocabulary_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    make_tokenizer(set(ALPHABET)).save_pretrained(tmp_path)
    text, read = Tokenizer(str(tmp_path)), list[int]()
    own = type(text.plain).get_vocab
    monkeypatch.setattr(type(text.plain), "get_vocab", lambda self: (read.append(1), own(self))[1])
    replies = Replies(text, "vllm:qwen3_xml")
    assert read
    read.clear()
    for _ in range(3):
        assert replies._parser(Said("Well.", "Well.", TOOLS)) == ("Well.", [])
    assert not read


def test_a_tokenizer_without_a_template_says_so(tokenizers: dict[bool, Path]) -> None:
    with pytest.raises(SetupError, match=r"gateway.tool_calls: template: .* no response_template"):
        Replies(Tokenizer(str(tokenizers[True])), "template")
