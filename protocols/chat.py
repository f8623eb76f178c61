"""Messages of a chat, and what is told beside them, in the form that chat templates read, however a data set has
written them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def as_chat(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """``messages`` with contents of text, and with calls of tools as OpenAI has them, their arguments as maps. Keys
    that are null or an empty list are left out. Raises `ValueError`, which names the message, for what is none.

    >>> as_chat([{"role": "user", "content": [{"type": "text", "text": "2+2?"}], "name": None}])
    [{'role': 'user', 'content': '2+2?'}]
    """
    return [_message(message, number) for number, message in enumerate(messages)]


def _message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message or not {"content", "tool_calls"} & message.keys():
        raise ValueError(f"message {number} is no map with role and content: {str(message)[:80]}")
    given = message.get("tool_calls") or []
    if not isinstance(given, list):
        raise ValueError(f"tool_calls of message {number} are no list: {str(given)[:80]}")
    calls = [_call(call, f"call {place} of message {number}") for place, call in enumerate(given)]
    content: Any = message.get("content")
    if content is None and calls:
        content = ""
    elif isinstance(content, list):
        content = words_of(content, f"content of message {number}")
    found = {"role": message["role"], "content": content}
    found |= {name: value for name, value in message.items() if name not in (*found, "tool_calls")}
    for name, value in found.items():
        if not isinstance(value, str) and not (name not in ("role", "content") and value in (None, [])):
            raise ValueError(f"{name} of message {number} is {json.dumps(value, default=str)[:80]}, not text")
    found = {name: value for name, value in found.items() if isinstance(value, str)}
    return found | ({"tool_calls": calls} if calls else {})


def words_of(parts: Sequence[Any], where: str, mark: str = "") -> str:
    """The texts of a content in ``parts``, joined; a picture is a ``mark``. Raises `ValueError`, which says ``where``,
    for other parts, and where there is no mark for pictures."""
    words = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("image", "image_url") and mark:
            words.append(mark)
        elif kind == "text" and isinstance(text := part.get("text"), str):
            words.append(text)
        else:
            raise ValueError(f"{where} has a part that is no text (pictures: images_key): {str(part)[:80]}")
    return "".join(words)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        form = '{"function": {"name": …, "arguments": {…}}}'
        raise ValueError(f"{where} (tool_calls) is {str(call)[:80]}; it must be as OpenAI has it, {form}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            pass  # refused below
    if arguments is not None and not isinstance(arguments, dict):
        raise ValueError(f"{where} ({name}) has arguments that are no map, nor JSON of one: {str(arguments)[:80]}")
    id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**id, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def as_tools(found: Any) -> list[dict[str, Any]] | None:
    """Tools as chat templates are told of them: a list of JSON schemas, or JSON of one; None where there are none.
    Raises `ValueError` for anything else."""
    if isinstance(found, str):
        try:
            found = json.loads(found) if found.strip() else None
        except (ValueError, RecursionError):
            raise ValueError(f"tools are no JSON: {found[:80]}") from None
    if found is None or found == []:
        return None
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        raise ValueError(f"tools are no list of maps (JSON schemas of functions): {str(found)[:80]}")
    return [dict(tool) for tool in found]


RENDERING = {
    "chat_template",
    "messages",
    "conversation",
    "tools",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
    "padding",
    "truncation",
    "max_length",
    "tokenizer_kwargs",
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
}
"""What a chat template is told by whoever renders it, or how its tokens are made."""
MOST_TOLD, MOST_NAMES = 1 << 16, 64
"""Characters of what a template may be told beside messages and tools, as JSON; and names in it."""


def as_template_kwargs(found: Any) -> dict[str, Any] | None:
    """What a chat template is told beside messages and tools: a map, or JSON of one, as JSON has it; what is null in it
    is as if it were not there, and so is a map of nothing. Raises `ValueError` for anything else."""
    if isinstance(found, str):
        try:
            found = json.loads(found) if found.strip() else None
        except (ValueError, RecursionError):
            raise ValueError(f"it is no JSON: {found[:80]}") from None
    if found is None:
        return None
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise ValueError(f'it is no map, as {{"enable_thinking": false}} is: {str(found)[:80]}')
    found = {name: value for name, value in found.items() if value is not None}
    if len(found) > MOST_NAMES:
        raise ValueError(f"it has {len(found):,} names, of {MOST_NAMES} that there may be")
    if odd := sorted(RENDERING & found.keys()):
        raise ValueError(f"{odd[0]} is not for a prompt to say; leave it out")
    try:
        words = json.dumps(found, allow_nan=False)
        json.dumps(found, ensure_ascii=False).encode()  # which half a character is not
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"it cannot be written as JSON: {error}") from None
    if len(words) > MOST_TOLD:
        raise ValueError(f"it has {len(words):,} characters, of {MOST_TOLD:,} that there may be")
    return json.loads(words) or None


def said(message: Mapping[str, Any]) -> str:
    """A message of `as_chat` in words: its content, and its calls as JSON, each in a line."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return "\n".join([message["content"]] * bool(message["content"] or not calls) + calls)
