"""Who finds calls of tools in what the policy says: whether it is there, and gives what is read of it."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from penstock.services.runtime.errors import PackageError, SetupError
from penstock.services.runtime.install import install
from penstock.services.runtime.plugins import user_code
from penstock.services.turns.tool_calls import HARMONY, TEMPLATE, VLLM, Call, by_text

if TYPE_CHECKING:
    from penstock.services.turns.tokenizer import Tokenizer


def check_fits(name: str, text: Tokenizer, key: str) -> None:
    """Raises `SetupError` where the model's tokenizer has not what the parser reads."""
    from penstock.services.turns.library_parsers import check_channels, of_template

    if name == HARMONY:
        check_channels(text, key)
    if name == TEMPLATE:
        of_template(text, key)


def try_parser(name: str, key: str) -> None:
    """The parser that the config's ``key`` names, on words that need not hold a call. A library's is looked for when
    who asks it starts: it needs the tokenizer. Raises `SetupError`."""
    if name in (HARMONY, TEMPLATE):
        return
    if name.startswith(VLLM):
        if importlib.util.find_spec("vllm") is None:
            raise PackageError(f"{key}: {name} needs vLLM where calls are looked for; run: {install('vllm')}")
        return
    find = by_text(name, key)
    with user_code(key, name):
        found = find("sort ba")
    whole = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], str) and isinstance(found[1], list)
    if not whole or not all(isinstance(call, Call) for call in found[1]):
        raise SetupError(
            f"{key}: {name} returned {type(found).__name__}; it must return the text that is left, and a list of "
            "penstock.services.turns.tool_calls.Call"
        )
