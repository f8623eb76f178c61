"""Calls of tools in gpt-oss' channels (https://cookbook.openai.com/articles/openai-harmony), which special tokens tell
apart:

    <|channel|>analysis<|message|>Add them.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>
"""

from __future__ import annotations

import json
import re

from penstock.services.turns.channels import CHANNEL, ENDS, MESSAGE, START, THOUGHT
from penstock.services.turns.tool_calls import THINK, UNTHINK, Call, Said

_CALLED = re.compile(r"\bto=functions\.([^\s<]{1,256})")


def in_harmony(said: Said) -> tuple[str, list[Call]]:
    """What is left of an answer, and the calls in it. Where one of them is not sound, all of it is text.

    >>> marked = '<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>commentary to=functions.add '
    >>> in_harmony(Said("", marked + '<|constrain|>json<|message|>{"a": 1}', ""))
    ('<think>Well.</think>', [Call(name='add', arguments={'a': 1})])
    """
    left: list[str] = []
    calls: list[Call] = []
    for part in said.marked.split(START):
        header, message, body = part.partition(MESSAGE)
        role, _, about = header.partition(CHANNEL)
        body, channel = _until_an_end(body), about.split()[:1]
        if not message or (role.split()[:1] not in ([], ["assistant"]) and not role.lstrip().startswith("to=")):
            continue  # what it only imagines that others say
        if found := _CALLED.search(header):
            try:
                arguments = json.loads(body or "{}")
            except (ValueError, RecursionError):
                return said.text, []
            if not isinstance(arguments, dict):
                return said.text, []
            calls.append(Call(found[1], arguments))
        elif channel == [THOUGHT]:
            left.append(f"{THINK}{body}{UNTHINK}")
        else:  # the answer, or a word about the calls that follow
            left.append(body)
    return ("".join(left), calls) if calls else (said.text, [])


def _until_an_end(body: str) -> str:
    ends = [place for end in ENDS if (place := body.find(end)) >= 0]
    return body[: min(ends)] if ends else body
