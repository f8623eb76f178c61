"""How a policy asks for tools, in its own words: found in what it said, by a parser for each way of asking."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from penstock.services.runtime.plugins import load_plugin

log = structlog.get_logger()

THINK, UNTHINK = "<think>", "</think>"
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
    thinking: bool = False
    """The template has begun a thought: it is one up to ``</think>``."""


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


def thoughts_apart(text: str, thinking: bool = False) -> list[tuple[bool, str]]:
    """The parts of an answer, and of each whether it was only thought: up to ``</think>``, also where the template has
    begun the first thoughts (``thinking``: it certainly has). Those that stand in a call are the call's.

    >>> thoughts_apart("Add? </think>Well.<think>No.</think> 3")
    [(True, 'Add? </think>'), (False, 'Well.'), (True, '<think>No.</think>'), (False, ' 3')]
    """
    parts: list[tuple[bool, str]] = []
    begun, ended = 0, text.find(UNTHINK)
    before = text[: max(ended, 0)]
    if thinking and ended < 0:
        return [(True, text)] if text else []
    if thinking or (ended >= 0 and THINK not in before and before.count(OPEN) == before.count(CLOSE)):
        begun = ended + len(UNTHINK)
        parts.append((True, text[:begun]))
    thought, call = text.find(THINK, begun), text.find(OPEN, begun)
    while thought >= 0:
        if 0 <= call < thought:
            behind = _behind(CLOSE, text, call)
            thought, call = text.find(THINK, behind), text.find(OPEN, behind)
            continue
        parts.append((False, text[begun:thought]))
        begun = _behind(UNTHINK, text, thought)
        parts.append((True, text[thought:begun]))
        thought = text.find(THINK, begun)
        call = text.find(OPEN, begun) if 0 <= call < begun else call
    return [(was, part) for was, part in [*parts, (False, text[begun:])] if part]


def _behind(tag: str, text: str, start: int) -> int:
    """Where the next ``tag`` ends; where there is none, the end."""
    found = text.find(tag, start)
    return len(text) if found < 0 else found + len(tag)


def behind_thoughts(text: str, thinking: bool = False) -> tuple[str, str]:
    """The thoughts that an answer begins with, empty where there are none, and all behind them."""
    said = itertools.dropwhile(lambda part: part[0] or part[1].isspace(), thoughts_apart(text, thinking))
    behind = "".join(part for _, part in said)
    return text.removesuffix(behind), behind


def aloud(text: str, thinking: bool = False) -> str:
    """An answer without what was only thought."""
    return "".join(part for thought, part in thoughts_apart(text, thinking) if not thought)


def hermes(text: str, thinking: bool = False) -> tuple[str, list[Call]]:
    """Calls between ``<tool_call>`` and ``</tool_call>``, as JSON, but for those that were only thought of. Where one
    is not sound, all of it is text.

    >>> hermes('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Let me see.', [Call(name='add', arguments={'a': 1})])
    """
    parts = [(part, []) if thought else between_tags(part) for thought, part in thoughts_apart(text, thinking)]
    left, calls = "".join(part for part, _ in parts), []
    for each in (call for _, found in parts for call in found):
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


HERMES = "hermes"
PARSERS = {HERMES: hermes, "none": plain}
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
