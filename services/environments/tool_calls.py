"""Calls of tools in what the policy says, in the forms that families of models learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.services.turns.tool_calls import Form, as_written, read_call

BEGIN = {"hermes": "<tool_call>", "xml": "<function="}
"""What a chat template that tells of tools says of calls."""


def calls_in(answer: str, form: Form, schemas: Mapping[str, Mapping[str, Any]], thinking: bool = False) -> list[str]:
    """See `as_written`.

    >>> calls_in('{"name": "add", "parameters": {"a": 1}}', "json", {})
    ['{"name": "add", "arguments": {"a": 1}}']
    >>> calls_in("<tool_call><function=add><parameter=a>1</parameter></function></tool_call>", "xml", {})
    ['{"name": "add", "arguments": {"a": 1}}']
    """
    return as_written(answer, form, schemas, thinking)[1]


def as_called(
    answer: str, form: Form, results: Sequence[Mapping[str, str]], turn: int, thinking: bool = False
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """``answer``, the one of this ``turn``, as a message with a call for each of the tools' ``results``, and these with
    its ids, of nine letters, and names: some chat templates refuse a result of which they do not know whose it is.

    >>> results = [{"role": "tool", "content": "3"}]
    >>> asked, told = as_called('<tool_call>{"name": "add"}</tool_call>', "hermes", results, 1)
    >>> asked["tool_calls"][0]["function"]["name"], told
    ('add', [{'role': 'tool', 'content': '3', 'tool_call_id': '0001c0000', 'name': 'add'}])
    """
    found = calls_in(answer, form, {}, thinking)
    calls: list[dict[str, Any]] = []
    told: list[dict[str, str]] = []
    for message in map(dict, results):
        if message["role"] == "tool":
            place = len(calls)
            id = message.setdefault("tool_call_id", f"{turn:04}c{place:04}")
            name = message.get("name") or called_by(found[place] if place < len(found) else "")
            message.setdefault("name", name)
            calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": {}}})
        told.append(message)
    return {"role": "assistant", "content": answer} | ({"tool_calls": calls} if calls else {}), told


def called_by(call: str) -> str:
    """The name of what is called; of what cannot be read, that it is a tool."""
    try:
        name = read_call(call)[0]
    except ValueError:
        return "tool"
    return name if isinstance(name, str) else "tool"
