"""Results of tools behind an answer, as the chat templates of model families want to be told of them."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig

from penstock.pipeline.models.tiny import make_tokenizer
from penstock.protocols import wire
from penstock.protocols.experience import Prompt, as_bytes
from penstock.protocols.messages import Lease
from penstock.services.gateway.conversation import Conversation
from penstock.services.gateway.errors import AgentError
from penstock.services.gateway.questions import Asking
from penstock.services.gateway.replies import Replies
from penstock.services.gateway.session import canonical
from penstock.services.turns.answers import Answer
from penstock.services.turns.given import given_trajectory
from penstock.services.turns.tokenizer import Tokenizer
from tests.gateway.house import House

CHATML = """
{%- for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{{ '<tool_response>' + m.content + '</tool_response>' if m.role == 'tool' else m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MISTRAL = """
{%- for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}
{{- (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ '' if loop.last else ', ' }}{% endfor %}]<|im_end|>
{%- elif m.role == 'assistant' %}{{ m.content }}<|im_end|>
{%- else %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif -%}
[TOOL_RESULTS]{{ m.content }}:{{ m.tool_call_id }}[/TOOL_RESULTS]{% endif %}{% endfor %}"""
GPT_OSS = """
{%- set last = namespace(name=none) %}
{%- for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}
{%- set last.name = m.tool_calls[0].function.name -%}
<|im_start|>assistant to={{ last.name }}{{ m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('no previous assistant message with a tool call!') }}{% endif -%}
<|im_start|>{{ last.name }} to=assistant{{ m.content }}<|im_end|>
{%- else %}{% set last.name = none %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"""
NAMED = """
{%- for m in messages %}<|im_start|>{{ m.role }}:
{%- if m.role == 'tool' and not m.name %}{{ raise_exception('Tool response dicts require a name!') }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>{% endfor %}"""
ONE_CALL = """
{%- for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call!') }}{% endif %}
{{- m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>
{%- endfor %}"""
DEEPSEEK = """
{%- for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}
{%- elif m.role == 'tool' %}<result>{{ m.content }}</result>
{%- else %}<Assistant>{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}
{{- '<call>' + c.function.name + '<sep>' + c.function.arguments + '</call>' }}{% endfor %}
{{- '<|im_end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<Assistant>{% endif %}"""
RESPONSE = "\n<|im_start|>user\n<tool_response>7</tool_response><|im_end|>\n<|im_start|>assistant\n"
WITHOUT_TOOLS = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NEWEST = """
{%- for m in messages %}
{%- if tools and loop.last and m.role == 'user' %}{{ tools | tojson }}{% endif -%}
<|im_start|>{{ m.role }}:{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>{% endfor %}"""
TOLD = """
{%- for m in messages %}{{ m.content }}<eos>{% endfor %}
{%- if add_generation_prompt %}{{ 't' if enable_thinking else 'n' }}{{ level }}={% endif %}"""
MARKS = ["<|im_start|>", "<|im_end|>", "<|call|>"]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def text_of(folder: Path, template: str | dict[str, str]) -> Tokenizer:
    tokenizer = make_tokenizer(set(string.printable))
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS[:2]})
    tokenizer.add_tokens(
        MARKS[2:], special_tokens=True
    )  # as gpt-oss has it: special, and not among those that are named
    tokenizer.save_pretrained(folder)
    return Tokenizer(str(folder))


def asked(count: int = 1) -> dict[str, Any]:
    calls = [
        {"id": f"{place}aaaaaaa0", "type": "function", "function": {"name": "add", "arguments": {"a": place}}}
        for place in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize(
    ("template", "mark", "behind"),
    [
        (
            CHATML,
            "<|im_end|>",
            RESPONSE,
        ),
        (DEEPSEEK, "<|im_end|>", "<result>7</result><Assistant>"),
        (MISTRAL, "<|im_end|>", "[TOOL_RESULTS]7:0aaaaaaa0[/TOOL_RESULTS]"),
        (GPT_OSS, "<|call|>", "<|im_start|>add to=assistant7<|im_end|><|im_start|>assistant"),
    ],
)
def test_a_result_is_told_as_the_template_tells_it(tmp_path: Path, template: str, mark: str, behind: str) -> None:
    text = text_of(tmp_path, template)
    result = [{"role": "tool", "tool_call_id": "0aaaaaaa0", "content": "7"}]
    ended = text.plain.convert_tokens_to_ids(mark)
    found = [text.plain.decode(text.observe(result, True, token, asked())) for token in (ended, 5)]
    assert found == [behind, mark + behind], "its end is added where it was not sampled"


def test_a_template_that_takes_arguments_as_text_alone_is_given_text(tmp_path: Path) -> None:
    text = text_of(tmp_path, DEEPSEEK)
    chat = [{"role": "user", "content": "0?"}, asked(), {"role": "tool", "tool_call_id": "0aaaaaaa0", "content": "7"}]
    told = text.plain.decode(text.encode_chat(chat))
    assert told == '<User>0?<Assistant><call>add<sep>{"a": 0}</call><|im_end|><result>7</result><Assistant>'


def test_the_template_of_chats_with_tools_tells_their_results_and_calls(tmp_path: Path) -> None:
    """Hermes' and Command-R's tokenizers have one for chats with tools, and another for those without."""
    text = text_of(tmp_path, {"default": WITHOUT_TOOLS, "tool_use": CHATML})
    result = [{"role": "tool", "tool_call_id": "0aaaaaaa0", "content": "7"}]
    ended = text.plain.convert_tokens_to_ids("<|im_end|>")
    assert text.plain.decode(text.observe(result, True, ended, asked(), (), TOOLS)) == RESPONSE
    assert text.lost_call(asked(), TOOLS) == "" and text.lost_call(asked()) == "add"
    talk = [asked(), *result, {"role": "assistant", "content": "so 7"}]
    row = Prompt(index=0, messages=[{"role": "user", "content": "?"}], answer=talk, tools=TOOLS)
    made = text.plain.decode(given_trajectory(text, row, "all", 0, None).tokens)
    call = json.dumps(asked()["tool_calls"][0]["function"])
    assert made.endswith(f"<tool_call>{call}</tool_call><|im_end|>{RESPONSE}so 7<|im_end|>")


def test_tools_that_a_template_tells_before_the_newest_words_are_told_once(tmp_path: Path) -> None:
    text, ended = text_of(tmp_path, NEWEST), "<|im_end|>"
    id = text.plain.convert_tokens_to_ids(ended)
    assert "add" in text.plain.decode(text.encode_chat([{"role": "user", "content": "a"}], TOOLS))
    assert text.plain.decode(text.observe("b", True, id, None, (), TOOLS)) == f"<|im_start|>user:b{ended}"


@pytest.mark.parametrize("template", [CHATML, ONE_CALL])
def test_where_calls_change_nothing_tokens_are_as_without_them(tmp_path: Path, template: str) -> None:
    text = text_of(tmp_path, template)
    results = [{"role": "tool", "tool_call_id": f"{place}aaaaaaa0", "content": "7"} for place in range(2)]
    added = [*results, {"role": "user", "content": "more"}]
    for token in (text.plain.convert_tokens_to_ids("<|im_end|>"), 5):
        with_calls, without = (text.observe(added, True, token, each) for each in (asked(2), None))
        assert with_calls.tolist() == without.tolist()


def test_a_parser_is_not_shown_the_token_that_ended_a_turn(tmp_path: Path) -> None:
    """Such as gpt-oss' end of a call: special, listed by the model, and not among those that are named."""
    text = text_of(tmp_path, GPT_OSS)
    call = text.plain.convert_tokens_to_ids("<|call|>")
    assert call not in text.plain.all_special_ids
    GenerationConfig(eos_token_id=[call, text.plain.eos_token_id]).save_pretrained(tmp_path)
    said = Tokenizer(str(tmp_path)).decode_marked(text._tokenize("a<|im_start|>b<|call|>"))
    assert said == "a<|im_start|>b"


def test_ids_of_calls_are_nine_letters_and_digits_and_each_its_own(tokenizers: dict[bool, Path], model: Any) -> None:
    house = House(tokenizers[True], model)
    replies = Replies(house.text, "tests.gateway.test_templates:twice")
    none = np.zeros(0, np.float32)
    answer = Answer(np.array([5, 6], np.int32), none, none)

    def ids(lease: Lease, place: int, turn: int) -> list[str]:
        message, _ = replies.message(lease, place, turn, answer, json.dumps(TOOLS))
        return [call["id"] for call in message["tool_calls"]]

    where = itertools.product(map(house.lease, range(3)), range(4), range(20))
    found = [id for lease, place, turn in where for id in ids(lease, place, turn)]
    assert len(set(found)) == len(found) == 3 * 4 * 20 * 2
    assert all(len(id) == 9 and id.isascii() and id.isalnum() for id in found)
    assert ids(house.lease(1), 2, 3) == ids(house.lease(1), 2, 3), "restored, they are the same"


def twice(text: str) -> tuple[str, list[Any]]:
    """A parser that finds two calls."""
    from penstock.services.turns.tool_calls import Call

    return "", [Call("add", {"a": 1})] * 2


def test_what_the_template_is_told_is_the_tasks_and_the_agents_and_tells_conversations_apart(
    tokenizers: dict[bool, Path], model: Any
) -> None:
    house = House(tokenizers[True], model)
    house.text.plain.chat_template = TOLD
    task = {"enable_thinking": False, "level": "a"}
    own = Prompt(index=0, messages=[{"role": "user", "content": "ab"}], chat_template_kwargs=task)
    asked = house.lease(0).model_copy(update={"prompt": own})

    async def play() -> None:
        house.desk.start(asked)
        held = await house.desk.open(1)
        said: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        plain, same, other = [
            await house.desk.chat(held, Conversation(said, None, told))
            for told in (None, {"level": "a"}, {"level": "b", "enable_thinking": True})
        ]
        ends = [house.text.decode([turn.given.tolist()])[0][-3:] for turn in (plain, same, other)]
        assert ends == ["na=", "na=", "tb="]
        more = [*said, other.message, {"role": "user", "content": "b"}]
        for told, parent in (({"level": "b", "enable_thinking": True}, other), ({"level": "b"}, None)):
            turn = await house.desk.chat(held, Conversation(more, None, told))
            assert turn.parent == (parent.number if parent else None)
        before = house.desk._held[held.id].session.turns
        with pytest.raises(AgentError, match="chat_template_kwargs.depth: the chat template does not look at it"):
            await house.desk.chat(held, Conversation(said, None, {"depth": 1}))
        house.open().start(asked.model_copy(update={"records": dict(house.records["train", 0])}))
        after = (await house.desk.find(held.id)).session.turns
        assert [turn.telling for turn in after.values()] == [turn.telling for turn in before.values()]
        last = after[max(after)]
        goes_on = Conversation([*last.said, said[0]], None, {"level": "b"})
        again = await house.desk.chat(await house.desk.find(held.id), goes_on)
        assert again.parent == last.number

    house.run(play)


def test_who_says_what_the_run_says_begins_no_branch_nor_does_who_asks_a_gateway_of_newer_code(
    tokenizers: dict[bool, Path], model: Any
) -> None:
    text = Tokenizer(str(tokenizers[True]), {"level": "b"})
    text.plain.chat_template = TOLD
    house = House(model=model, text=text)
    house.desk.start(house.lease(0))
    said: list[dict[str, Any]] = [{"role": "user", "content": "a"}]

    async def play() -> None:
        held = await house.desk.open(1)
        first = await house.desk.chat(held, Conversation(said), asked=Asking(key="r"))
        more = [*said, first.message, {"role": "user", "content": "b"}]
        second = await house.desk.chat(held, Conversation(more, None, {"level": "b"}))
        assert second.parent == first.number
        for name, data in house.records["train", 0].items():
            if name.startswith("note."):
                note = wire.unpack(data.tobytes())
                assert note.pop("template") == ""
                house.records["train", 0][name] = as_bytes(wire.pack(note))
        house.open().start(house.lease(0))
        held = await house.desk.find(held.id)
        again = await house.desk.chat(held, Conversation(said), asked=Asking(key="r"))
        assert again.number == first.number and len(held.session.turns) == 2

    house.run(play)


@pytest.mark.parametrize("template", [MISTRAL, GPT_OSS, NAMED])
def test_an_agent_tells_results_to_a_template_that_wants_to_know_of_calls(
    tokenizers: dict[bool, Path], model: Any, template: str
) -> None:
    house = House(tokenizers[True], model, tool_calls="tests.gateway.test_templates:twice")
    for mark, short in {**dict.fromkeys(MARKS[1:], "<eos>"), MARKS[0]: "", "TOOL_RESULTS": "", " to=": ""}.items():
        template = template.replace(mark, short)  # the engine has little room
    house.text.plain.chat_template = template

    async def play() -> None:
        house.desk.start(house.lease(0))
        held = await house.desk.open(1)
        said: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        first = await house.desk.chat(held, Conversation(said, TOOLS))
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "b"} for c in first.message["tool_calls"]]
        second = await house.desk.chat(held, Conversation([*said, canonical(first.message), *results], TOOLS))
        assert second.parent == first.number
        await house.desk.finish(held.id, 1.0)

    house.run(play)
    (made,) = house.delivered["train", 0].trajectories  # type: ignore[union-attr]
    assert made.sampled == sum(len(answer.tokens) for answer in house.engines_own)
