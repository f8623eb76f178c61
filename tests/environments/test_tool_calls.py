"""How the policy calls tools, in the forms of several families."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.services.environments.tool_calls import Form, calls_in

SCHEMAS = {"days": {"properties": {"first": {"type": "string"}, "count": {"type": "integer"}}}}
CALL = {"name": "days", "arguments": {"first": "1", "count": 2}}
XML = "<tool_call><function=days>{}{}</function></tool_call>".format(
    "<parameter=first>\n1\n</parameter>\n", "<parameter=count>\n2\n</parameter>\n"
)
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
        ("json", f"It is {LLAMA}", []),
        ("hermes", LLAMA, []),
        ("hermes", f"<think>maybe <tool_call>{LLAMA}</tool_call></think>3", []),
        ("xml", f"<think>maybe {XML}</think>{XML}", [CALL]),
        ("xml", f"<think>maybe {XML}", []),
    ],
)
def test_calls_are_found_in_what_is_said_aloud(form: Form, said: str, calls: list[dict[str, Any]]) -> None:
    assert [json.loads(call) for call in calls_in(said, form, SCHEMAS)] == calls


@pytest.mark.parametrize("form", ["hermes", "xml"])
def test_what_cannot_be_read_stays_as_it_was_written(form: Form) -> None:
    assert calls_in("<tool_call>days(1)</tool_call>", form, SCHEMAS) == ["days(1)"]
