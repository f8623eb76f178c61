"""How a policy asks for tools, in its own words: found in what it said, by a parser for each way of asking."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from penstock.services.runtime.plugins import load_plugin

log = structlog.get_logger()

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""How Hermes' and Qwen's chat templates ask for a call: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""


@dataclass(frozen=True)
class Call:
    """A tool that the policy asks for."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Said:
    """One turn of the policy, where tools were told of."""

    text: str
    """Without special tokens."""
    marked: str
    """With them, but for the one that ends the turn."""
    tools: str
    """As JSON: a list, as chat completions have it."""


Parser = Callable[[Said], tuple[str, list[Call]]]
"""From what the policy said to what is left for people, and the calls in it."""


def between_tags(text: str) -> tuple[str, list[str]]:
    """What stands outside of ``<tool_call>`` and ``</tool_call>``, and what stands in each pair of them.

    >>> between_tags("Well. <tool_call> a </tool_call><tool_call>b</tool_call>")
    ('Well. ', ['a', 'b'])
    """
    outside, inside, end = [], [], 0
    # Not by a regular expression: it would look for a closing tag again from every opening one.
    while (start := text.find(OPEN, end)) >= 0 and (close := text.find(CLOSE, start + len(OPEN))) >= 0:
        outside.append(text[end:start])
        inside.append(text[start + len(OPEN) : close].strip())
        end = close + len(CLOSE)
    return "".join([*outside, text[end:]]), inside


def hermes(text: str) -> tuple[str, list[Call]]:
    """Calls between ``<tool_call>`` and ``</tool_call>``, as JSON. Where one is not sound, all of it is text.

    >>> hermes('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Let me see.', [Call(name='add', arguments={'a': 1})])
    """
    left, found = between_tags(text)
    calls = []
    for each in found:
        try:
            said = json.loads(each)
            name, arguments = said["name"], said.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return text, []
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return text, []
        calls.append(Call(name, arguments))
    return (left.strip(), calls) if calls else (text, [])


def plain(text: str) -> tuple[str, list[Call]]:
    """No calls, whatever it says."""
    return text, []


PARSERS = {"hermes": hermes, "none": plain}
TEMPLATE, VLLM = "template", "vllm:"
"""Names of libraries' parsers: the tokenizer's own; and what vLLM's begin with."""


def by_text(name: str, key: str) -> Callable[[str], tuple[str, list[Call]]]:
    """The one that the config's ``key`` names, of those that read text alone: one of `PARSERS`, or
    ``module:function``."""
    return PARSERS[name] if name in PARSERS else load_plugin(name, key)


def careful(parse: Parser) -> Parser:
    """Where a parser raises, or what it finds cannot be told as JSON, all is text: what the policy writes may be
    anything."""

    def checked(said: Said) -> tuple[str, list[Call]]:
        try:
            left, calls = parse(said)
            left.encode()
            for call in calls:
                _check(call)
        except Exception as error:
            log.warning("a parser of calls failed: all is text", error=f"{type(error).__name__}: {error}"[:200])
            return said.text, []
        return left, calls

    return checked


def _check(call: Call) -> None:
    """Raises where an agent could not be told of it: half a surrogate pair has no UTF-8, and NaN is no JSON."""
    if not isinstance(call.name, str) or not isinstance(call.arguments, dict):
        raise ValueError(f"not a call: {call!r}")
    json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
