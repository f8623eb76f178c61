"""How a policy asks for tools, in its own words: found in what it said, by a parser for each way of asking."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.services.runtime.plugins import load_plugin

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
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


def hermes(text: str) -> tuple[str, list[Call]]:
    """Calls between ``<tool_call>`` and ``</tool_call>``, as JSON. Where one is not sound, all of it is text.

    >>> hermes('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Let me see.', [Call(name='add', arguments={'a': 1})])
    """
    calls = []
    for found in CALL.findall(text):
        try:
            said = json.loads(found)
            name, arguments = said["name"], said.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError):
            return text, []
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return text, []
        calls.append(Call(name, arguments))
    return (CALL.sub("", text).strip(), calls) if calls else (text, [])


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
