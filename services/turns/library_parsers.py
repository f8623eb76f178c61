"""How a model family asks for tools, by its parser's name: forms of our own, and libraries' parsers, which are the
tokenizer's own template and vLLM's."""

from __future__ import annotations

import importlib
import json
from typing import Any

from penstock.services.runtime.errors import SetupError
from penstock.services.turns.harmony_calls import in_harmony
from penstock.services.turns.tokenizer import Tokenizer
from penstock.services.turns.tool_calls import (
    FORMS,
    HARMONY,
    TEMPLATE,
    VLLM,
    Call,
    Parser,
    Said,
    behind_thoughts,
    by_text,
    careful,
    in_form,
)

_TOOLS = json.dumps([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}])


def parser_of(name: str, text: Tokenizer, key: str) -> Parser:
    """The one that the config's ``key`` names; where it raises all is text, and so is, of those that would take half a
    call for one, an answer that was cut off. Raises `SetupError`."""
    parse = careful(_named(name, text, key))
    if name in (HARMONY, TEMPLATE) or name.startswith(VLLM):
        return lambda said: (said.text, []) if said.cut else parse(said)
    return parse


def _named(name: str, text: Tokenizer, key: str) -> Parser:
    if name == HARMONY:
        check_channels(text, key)
        return in_harmony
    if name == TEMPLATE:
        return of_template(text, key)
    if name.startswith(VLLM):
        return of_vllm(name.removeprefix(VLLM), text, key)
    if form := next((form for form in FORMS if form == name), None):
        return lambda said: in_form(form, said.text, said.thinking, said.tools)
    find = by_text(name, key)
    return lambda said: find(said.text)


def check_channels(text: Tokenizer, key: str) -> None:
    """Raises `SetupError` where no answer can have channels, in which calls of ``harmony`` are."""
    if text.channels is None:
        raise SetupError(
            f"{key}: harmony: the model's tokenizer has no special tokens for channels, as gpt-oss' has; name the form "
            "in which its chat template tells of calls"
        )


def of_template(text: Tokenizer, key: str) -> Parser:
    """The tokenizer's ``response_template``, by which transformers parses what its model says:
    https://huggingface.co/docs/transformers/main/chat_response_parsing. Raises `SetupError` where it has none."""
    if not text.has_response_template:
        raise SetupError(
            f"{key}: template: the model's tokenizer has no response_template; name one of vLLM's parsers "
            "(vllm:qwen3_xml), hermes, json, xml, harmony, or a function of yours"
        )

    def parse(said: Said) -> tuple[str, list[Call]]:
        found = text.parse_response(said.marked, json.loads(said.tools) if said.tools else None, said.before)
        if not isinstance(found, dict):
            return said.text, []
        functions = [call.get("function", call) for call in found.get("tool_calls") or ()]
        return found.get("content") or "", [_call(each.get("name"), each.get("arguments")) for each in functions]

    return parse


def of_vllm(name: str, text: Tokenizer, key: str) -> Parser:
    """vLLM's parser of this name: https://docs.vllm.ai/en/latest/features/tool_calling/. Raises `SetupError` where
    vLLM is not installed, has none, or has one that raises whatever it is asked."""
    try:
        parsers = importlib.import_module("vllm.tool_parsers").ToolParserManager
        protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    except ImportError as error:
        raise SetupError(f"{key}: vllm:{name}: vLLM is not installed here: {error}") from None
    if name not in parsers.list_registered():
        raise SetupError(f"{key}: vLLM has no parser {name!r}; it has {', '.join(parsers.list_registered())}")
    made, plain = parsers.get_tool_parser(name), _cached(text.plain)
    try:
        made(plain)
    except Exception as error:
        raise SetupError(f"{key}: vLLM's parser {name!r} does not fit the model's tokenizer: {error}") from error

    def parse(said: Said) -> tuple[str, list[Call]]:
        tools = json.loads(said.tools) if said.tools else []
        request = protocol.ChatCompletionRequest(messages=[], model="", tools=tools or None)
        thoughts, words = behind_thoughts(said.marked, said.thinking)  # which vLLM's own server has another parser for
        found = made(plain, request.tools).extract_tool_calls(words, request)
        if not found.tools_called:
            return said.text, []
        calls = [_call(each.function.name, each.function.arguments) for each in found.tool_calls]
        return thoughts + (found.content or ""), calls

    try:
        parse(Said("Well.", "Well.", _TOOLS))
    except Exception as error:  # some are there for vLLM's own server alone, and find nothing by themselves
        what = f"{type(error).__name__}: {error}"
        raise SetupError(
            f"{key}: vLLM's parser {name!r} cannot be asked for the calls in an answer ({what}); name another, "
            "template, or a function of yours"
        ) from error
    return parse


def _cached(tokenizer: Any) -> Any:
    """As vLLM has it: its parsers, of which each answer needs a new one, read the whole vocabulary."""
    try:
        wrap = importlib.import_module("vllm.tokenizers.hf").get_cached_tokenizer
    except (ImportError, AttributeError):  # elsewhere in other versions; without it all is slower
        return tokenizer
    return wrap(tokenizer)


def _call(name: Any, arguments: Any) -> Call:
    """Raises `ValueError` where it is none."""
    found = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    if not isinstance(name, str) or not isinstance(found, dict):
        raise ValueError("not a call")
    return Call(name, found)
