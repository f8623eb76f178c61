"""How calls of tools are told to a chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
"""Of a chat: ``role`` and ``content``, and for some templates more."""
_ARGUMENT = "penstock calls"
"""Stands for what a tool is called with, to see what a template puts behind it."""
_ASKED = {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": {"at": "it"}}}


def marked_calls(calls: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[dict[str, Any]]]:
    """``calls`` with a mark for their arguments, and the marks."""
    marks = [f"{_ARGUMENT} {place}" for place in range(len(calls))]
    return marks, [
        {**call, "function": {**call["function"], "arguments": {"argument": mark}}}
        for call, mark in zip(calls, marks, strict=True)
    ]


def with_arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """``messages`` with what tools are called with as JSON text, as APIs write it."""
    return [
        {**message, "tool_calls": list(map(_written, calls))} if (calls := message.get("tool_calls")) else message
        for message in messages
    ]


def with_names(messages: Sequence[Message]) -> list[Message]:
    """``messages`` with the name of the function in each result that has none, by the id of the call before it: some
    chat templates refuse a result without one, and agents rarely give it."""
    names: dict[Any, Any] = {}
    found: list[Message] = []
    for message in messages:
        names |= {call.get("id"): call["function"].get("name") for call in message.get("tool_calls") or ()}
        name = names.get(message.get("tool_call_id")) if message.get("role") == "tool" else None
        found.append({**message, "name": name} if name and not message.get("name") else message)
    return found


def takes_text_alone(render: Callable[[Sequence[Message]], Any]) -> bool:
    """The chat template behind ``render`` joins arguments to text, and fails where they are a map (DeepSeek's)."""
    chat: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [_ASKED]},
    ]
    return not _renders(render, chat) and _renders(render, with_arguments_as_text(chat))


def _renders(render: Callable[[Sequence[Message]], Any], chat: Sequence[Message]) -> bool:
    try:
        render(chat)
    except Exception:  # a template may raise anything
        return False
    return True


def _written(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    told = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": told}}
