"""Calls of tools in what the policy says, in the forms that families of models learn."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from penstock.services.turns.tool_calls import aloud, between_tags

Form = Literal["hermes", "json", "xml"]
BEGIN = {"hermes": "<tool_call>", "xml": "<function="}
"""What a chat template that tells of tools says of calls."""
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def calls_in(answer: str, form: Form, schemas: Mapping[str, Mapping[str, Any]], thinking: bool = False) -> list[str]:
    """Each as JSON, ``{"name": …, "arguments": {…}}``, or as it was written where it cannot be read. What was only
    thought, up to ``</think>``, calls nothing; ``thinking``: the template has begun a thought. ``schemas``: of the
    tools' arguments, by name; in XML all is text.

    >>> calls_in('{"name": "add", "parameters": {"a": 1}}', "json", {})
    ['{"name": "add", "arguments": {"a": 1}}']
    >>> calls_in("<tool_call><function=add><parameter=a>1</parameter></function></tool_call>", "xml", {})
    ['{"name": "add", "arguments": {"a": 1}}']
    """
    if form == "json":
        return ([] if thinking else _in_json(answer)) or _in_json(aloud(answer, thinking))
    found = between_tags(aloud(answer, thinking))[1]
    return found if form == "hermes" else [_of_xml(text, schemas) for text in found]


def as_called(
    answer: str, form: Form, results: Sequence[Mapping[str, str]], turn: int, thinking: bool = False
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """``answer``, the one of this ``turn``, as a message with a call for each of the tools' ``results``, and these with
    its ids, of nine letters: some chat templates refuse a result of which they do not know whose it is.

    >>> results = [{"role": "tool", "content": "3"}]
    >>> asked, told = as_called('<tool_call>{"name": "add"}</tool_call>', "hermes", results, 1)
    >>> asked["tool_calls"][0]["function"]["name"], told
    ('add', [{'role': 'tool', 'content': '3', 'tool_call_id': '0001c0000'}])
    """
    found = calls_in(answer, form, {}, thinking)
    calls: list[dict[str, Any]] = []
    told: list[dict[str, str]] = []
    for message in map(dict, results):
        if message["role"] == "tool":
            place = len(calls)
            id = message.setdefault("tool_call_id", f"{turn:04}c{place:04}")
            name = message.get("name") or _name(found[place] if place < len(found) else "")
            calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": {}}})
        told.append(message)
    return {"role": "assistant", "content": answer} | ({"tool_calls": calls} if calls else {}), told


def _name(call: str) -> str:
    """Of what is called; of what cannot be read, that it is a tool."""
    try:
        name = json.loads(call)["name"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "tool"
    return name if isinstance(name, str) else "tool"


def _in_json(said: str) -> list[str]:
    """The whole answer is one call, or a list of some, as Llama 3 and Mistral make them."""
    text = said.strip().removeprefix("<|python_tag|>").removeprefix("[TOOL_CALLS]")
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return []
    every = read if isinstance(read, list) else [read]
    if not every or not all(isinstance(each, dict) and "name" in each for each in every):
        return []
    return [json.dumps({"name": e["name"], "arguments": e.get("arguments", e.get("parameters"))}) for e in every]


def _of_xml(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> str:
    """As Qwen3-Coder's and Qwen 3.5's."""
    if (found := _FUNCTION.search(text)) is None:
        return text
    name = found[1].strip()
    schema = schemas.get(name, {}).get("properties", {})
    arguments = {key.strip(): _read(value, schema.get(key.strip())) for key, value in _PARAMETER.findall(found[2])}
    return json.dumps({"name": name, "arguments": arguments})


def _read(text: str, schema: Any) -> Any:
    """Text where the argument may be text, else what it is as JSON."""
    if _may_be_text(schema):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _may_be_text(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    kinds = schema.get("type")
    several = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds) or any(map(_may_be_text, several))
