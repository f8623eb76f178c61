"""How the policy calls tools, in the forms of several families."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from penstock.services.environments.tool_calls import calls_in
from penstock.services.environments.tools_config import read_options
from penstock.services.turns.library_parsers import parser_of
from penstock.services.turns.tool_calls import Form, Said

SCHEMAS = {"days": {"properties": {"first": {"type": "string"}, "count": {"type": "integer"}}}}
CALL = {"name": "days", "arguments": {"first": "1", "count": 2}}
XML = "<tool_call><function=days>{}{}</function></tool_call>".format(
    "<parameter=first>\n1\n</parameter>\n", "<parameter=count>\n2\n</parameter>\n"
)
THINKS = '{"name": "say", "arguments": {"text": "</think> and <think>"}}'
LLAMA = '{"name": "days", "parameters": {"first": "1", "count": 2}}'


@pytest.mark.parametrize(
    ("form", "said", "calls"),
    [
        ("hermes", f"Let me see. <tool_call>{json.dumps(CALL)}</tool_call>", [CALL]),
        ("xml", f"Let me see. {XML}{XML}", [CALL, CALL]),
        ("json", f" <|python_tag|>{LLAMA} ", [CALL]),
        ("json", f"[TOOL_CALLS][{json.dumps(CALL)}, {LLAMA}]", [CALL, CALL]),
        ("json", "17", []),
        ("json", '{"answer": 17}', []),
        ("json", '{"name": "Ada Lovelace", "born": 1815}', []),
        ("json", '[{"name": "Ada"}, {"name": "Bob"}]', []),
        ("json", '{"name": "now", "arguments": null}', [{"name": "now", "arguments": None}]),
        ("json", f"It is {LLAMA}", []),
        ("hermes", LLAMA, []),
        ("hermes", f"<think>maybe <tool_call>{LLAMA}</tool_call></think>3", []),
        ("xml", f"<think>maybe {XML}</think>{XML}", [CALL]),
        ("xml", f"<think>maybe {XML}", []),
        ("hermes", f"maybe <tool_call>{LLAMA}</tool_call></think>3", []),
        ("hermes", f"<think>a</think><tool_call>{THINKS}</tool_call>", [json.loads(THINKS)]),
        ("hermes", f"a</think><tool_call>{THINKS}</tool_call><think>b</think>", [json.loads(THINKS)]),
        ("json", THINKS, [json.loads(THINKS)]),
    ],
)
def test_calls_are_found_in_what_is_said_aloud(form: Form, said: str, calls: list[dict[str, Any]]) -> None:
    assert [json.loads(call) for call in calls_in(said, form, SCHEMAS)] == calls


@pytest.mark.parametrize(
    ("form", "call"), [("hermes", f"<tool_call>{LLAMA}</tool_call>"), ("xml", XML), ("json", LLAMA)]
)
def test_a_thought_that_the_template_has_begun_calls_nothing(form: Form, call: str) -> None:
    for said, calls in ((f"first <tool_call></think>{call}", 1), (f"maybe {call}", 0), (call, 0)):
        assert len(calls_in(said, form, SCHEMAS, thinking=True)) == calls


@pytest.mark.parametrize("form", ["harmony", "template", "vllm:glm45", "my_tools:calls", "json"])
def test_forms_of_libraries_and_users_are_taken_and_others_are_named(form: str) -> None:
    assert read_options({"functions": ["a:b"], "tool_calls": form}).tool_calls == form
    for wrong in ("none", "glm", ""):
        with pytest.raises(ValueError, match=r"^tool_calls: '(none|glm)?'"):
            read_options({"functions": ["a:b"], "tool_calls": wrong})


@pytest.mark.parametrize(
    ("form", "said", "left"),
    [
        ("hermes", f"Well. <tool_call>{json.dumps(CALL)}</tool_call>", "Well."),
        ("xml", f"Well. {XML}", "Well."),
        ("json", f"hm</think> {json.dumps(CALL)}", "hm</think>"),
        ("json", LLAMA, ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', ""),
        ("json", "It is 3.", None),
        ("xml", "<tool_call>days(1)</tool_call>", None),
    ],
)
def test_a_gateway_finds_the_calls_that_an_environment_runs(form: Form, said: str, left: str | None) -> None:
    functions = [{"name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
    told = json.dumps([{"type": "function", "function": function} for function in functions])
    content, calls = parser_of(form, cast(Any, None), "tool_calls")(Said(said, said, told))
    assert content == (said if left is None else left)
    run = [json.loads(call) for call in calls_in(said, form, SCHEMAS)] if left is not None else []
    assert [{"name": call.name, "arguments": call.arguments} for call in calls] == [
        {**call, "arguments": call["arguments"] or {}} for call in run
    ]


@pytest.mark.parametrize("form", ["hermes", "xml"])
def test_what_cannot_be_read_stays_as_it_was_written(form: Form) -> None:
    assert calls_in("<tool_call>days(1)</tool_call>", form, SCHEMAS) == ["days(1)"]


@pytest.mark.parametrize(
    ("schema", "given"),
    [
        ({"type": "string"}, "2024"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "2024"),
        ({"type": ["null", "string"]}, "2024"),
        ({"type": "integer"}, 2024),
        (True, 2024),
        ({}, 2024),
    ],
)
def test_in_xml_what_may_be_text_is_text(schema: Any, given: Any) -> None:
    said = "<tool_call><function=find><parameter=query>2024</parameter></function></tool_call>"
    (call,) = calls_in(said, "xml", {"find": {"properties": {"query": schema}}})
    assert json.loads(call)["arguments"] == {"query": given}
