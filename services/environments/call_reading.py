"""Calls of tools that a tokenizer or a library has to find, where they are run: in the environment's own process, which
has a deadline, since a parser may take long over what a policy repeats."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from penstock.services.runtime import own_code
from penstock.services.runtime.errors import SetupError
from penstock.services.turns.tool_calls import FORMS, Parser

if TYPE_CHECKING:
    from penstock.services.turns.tokenizer import Tokenizer


def told_of(text: Tokenizer) -> dict[str, Any]:
    """What a process is told of whose tokens the policy says."""
    return {"path": text.path, "template": text.given, "trusted": own_code.trusted()}


def parser(name: str, reads: dict[str, Any] | None) -> Parser | None:
    """The one called ``name`` of `ToolsConfig.tool_calls`, by `told_of`; None where no tokenizer is needed, or nobody
    has told of one: calls are as Hermes writes them then. Raises `ValueError`."""
    if name in FORMS or reads is None:
        return None
    return _made(name, json.dumps(reads))


@functools.cache
def _made(name: str, reads: str) -> Parser:
    from penstock.services.turns.library_parsers import parser_of
    from penstock.services.turns.tokenizer import Tokenizer

    told = json.loads(reads)
    own_code.trust(told["trusted"])
    try:
        return parser_of(name, Tokenizer(told["path"], told["template"]), "tool_calls")
    except SetupError as error:
        raise ValueError(str(error)) from error
