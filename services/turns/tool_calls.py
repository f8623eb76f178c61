"""How a policy asks for tools, in its own words: found in what it said, by a parser for each way of asking."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import structlog

from penstock.services.runtime.plugins import load_plugin

log = structlog.get_logger()

THINK, UNTHINK = "<think>", "</think>"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""How Hermes' and Qwen's chat templates ask for a call: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""
Form = Literal["hermes", "json", "xml"]
"""How families of models call tools."""
FORMS: tuple[Form, ...] = get_args(Form)
MOST_NAME = 256
"""Characters of the name of a function or an argument in XML."""


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
    cut: bool = False
    """It had no room to end: libraries' parsers would take half a call for one."""
    before: str = ""
    """What stands before it, with special tokens; empty: nobody has told."""


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


def answered(response: str) -> str:
    """``response`` without what was only thought, and the space behind that.

    >>> answered("Rome? No.</think>\\n\\nParis")
    'Paris'
    """
    said = aloud(response)
    return said if said == response else said.lstrip()


def as_written(
    answer: str, form: Form, schemas: Mapping[str, Mapping[str, Any]], thinking: bool = False
) -> tuple[str, list[str]]:
    """What is left of an answer, and each call in it as JSON, ``{"name": …, "arguments": {…}}``, or as it was written
    where it cannot be read. What was only thought, up to ``</think>``, calls nothing and is left; ``thinking``: the
    template has begun a thought. ``schemas``: of the tools' arguments, by name; in XML all is text.

    >>> as_written("Well. <tool_call>{}</tool_call>", "hermes", {})
    ('Well. ', ['{}'])
    """
    if form == "json":
        if not thinking and (calls := _in_json(answer)):
            return "", calls
        parts = thoughts_apart(answer, thinking)
        calls = _in_json("".join(part for thought, part in parts if not thought))
        return ("".join(part for thought, part in parts if thought) if calls else answer), calls
    said = [(part, []) if thought else between_tags(part) for thought, part in thoughts_apart(answer, thinking)]
    calls = [call for _, found in said for call in found]
    return "".join(part for part, _ in said), calls if form == "hermes" else [_of_xml(text, schemas) for text in calls]


def read_call(text: str) -> tuple[Any, Any]:
    """Name and arguments of a call in JSON, whatever these are; where there are no arguments, ``{}``. Raises
    `ValueError` where it is no call."""
    try:
        call = json.loads(text)
        arguments = call.get("arguments")
        return call["name"], {} if arguments is None else arguments
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no call: {text[:80]!r}") from error


def _in_json(said: str) -> list[str]:
    """The whole answer is one call, or a list of some, as Llama 3 and Mistral make them. What has a name alone may be
    any answer in JSON."""
    text = said.strip().removeprefix("<|python_tag|>").removeprefix("[TOOL_CALLS]")
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return []
    every = read if isinstance(read, list) else [read]
    keys = [each.keys() if isinstance(each, dict) else set() for each in every]
    if not every or not all("name" in each and {"arguments", "parameters"} & each for each in keys):
        return []
    return [json.dumps({"name": e["name"], "arguments": e.get("arguments", e.get("parameters"))}) for e in every]


def _of_xml(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> str:
    """As Qwen3-Coder's and Qwen 3.5's."""
    if (found := next(_elements("function", text), None)) is None:
        return text
    name, inside = found
    schema = schemas.get(name, {}).get("properties", {})
    values = {key: value.removeprefix("\n").removesuffix("\n") for key, value in _elements("parameter", inside)}
    arguments = {key: _read(value, schema.get(key)) for key, value in values.items()}
    return json.dumps({"name": name, "arguments": arguments})


def _elements(tag: str, text: str) -> Iterator[tuple[str, str]]:
    """Name and inside of each ``<tag=NAME>…</tag>``, one behind the other."""
    begin, end, at = f"<{tag}=", f"</{tag}>", 0
    while (start := text.find(begin, at)) >= 0:
        at = start + len(begin)
        called = text.find(">", at, at + MOST_NAME)
        if called < 0 or "\n" in (name := text[at:called]) or not name.strip():
            continue
        if (close := text.find(end, called)) < 0:  # nor is there one for any behind it
            return
        yield name.strip(), text[called + 1 : close]
        at = close + len(end)


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


def in_form(form: Form, text: str, thinking: bool = False, tools: str = "") -> tuple[str, list[Call]]:
    """What is left of what was said, and the calls in it, by `as_written`; ``tools`` as in `Said`. Where one of them is
    not sound, all of it is text.

    >>> in_form("hermes", 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Let me see.', [Call(name='add', arguments={'a': 1})])
    """
    functions = [each["function"] for each in json.loads(tools or "[]")] if form == "xml" else []
    schemas = {each["name"]: each.get("parameters") or {} for each in functions}
    left, written = as_written(text, form, schemas, thinking)
    calls = []
    for each in written:
        try:
            name, arguments = read_call(each)
        except ValueError:
            return text, []
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return text, []
        calls.append(Call(name, arguments))
    return (left.strip(), calls) if calls else (text, [])


def plain(text: str) -> tuple[str, list[Call]]:
    """No calls, whatever it says."""
    return text, []


PARSERS: dict[str, Callable[[str], tuple[str, list[Call]]]] = {
    **{form: partial(in_form, form) for form in FORMS},
    "none": plain,
}
HARMONY, TEMPLATE, VLLM = "harmony", "template", "vllm:"
"""Names of parsers that read special tokens, too: gpt-oss', the tokenizer's own; and what vLLM's begin with."""


def by_text(name: str, key: str) -> Callable[[str], tuple[str, list[Call]]]:
    """The one that the config's ``key`` names, of those that read text alone: one of `PARSERS`, or
    ``module:function``."""
    return PARSERS[name] if name in PARSERS else load_plugin(name, key)


def named_parser(value: str) -> str:
    """``value``, where it names a parser. Raises `ValueError`."""
    if value in PARSERS or value in (HARMONY, TEMPLATE) or value.startswith(VLLM) or ":" in value:
        return value
    raise ValueError(
        f"{value!r} is none of {', '.join(PARSERS)}, {HARMONY}, {TEMPLATE}, {VLLM}NAME of one of vLLM's parsers, and "
        "no module:function"
    )


def careful(parse: Parser) -> Parser:
    """Where a parser raises, or what it finds cannot be told as JSON, all is text: what the policy writes may be
    anything. The first time it is told where."""
    told = False

    def checked(said: Said) -> tuple[str, list[Call]]:
        try:
            left, calls = parse(said)
            left.encode()
            for call in calls:
                _check(call)
        except Exception as error:
            nonlocal told
            what = f"{type(error).__name__}: {error}"[:200]
            log.warning("a parser of calls failed: all is text", error=what, exc_info=not told)
            told = True
            return said.text, []
        return left, calls

    return checked


def _check(call: Call) -> None:
    """Raises where an agent could not be told of it: half a surrogate pair has no UTF-8, and NaN is no JSON."""
    if not isinstance(call.name, str) or not isinstance(call.arguments, dict):
        raise ValueError(f"not a call: {call!r}")
    json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
