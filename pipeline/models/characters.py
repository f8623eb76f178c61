"""Which characters a tiny model knows: it has a token for each."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.protocols.chat import said
from penstock.protocols.experience import Prompt
from penstock.services.data import DataError
from penstock.services.data.answers import answer_of, is_answer, own_answer

UNKNOWN = "<unk>"
"""What it reads in the place of any other."""
ALPHABET = string.ascii_lowercase + string.digits + " =+-*/?.,:()"
SEEN_PROMPTS = 2000
"""Prompts that are looked through for characters beyond `ALPHABET`."""


def characters_of(source: Sequence[Prompt], taught: bool, given: bool) -> set[str]:
    """Of the first prompts, and of what is learned from them: ``taught`` by the warm start, ``given`` in the run.
    Raises `DataError` where none of them can be used."""
    found = set(ALPHABET)
    for prompt in usable(source, range(min(SEEN_PROMPTS, len(source)))):
        found.update(prompt.as_text(), answer_of(prompt) if taught else "")
        if given:
            found.update(_words_of(own_answer(prompt)), _words_of(prompt.rejected))
    return found


def _words_of(answer: Any) -> str:
    """What is said in it; nothing of what is none: the run drops such a row, or has no use for it."""
    if not is_answer(answer):
        return ""
    return answer if isinstance(answer, str) else "".join(map(said, answer))


def usable(source: Sequence[Prompt], numbers: Iterable[int]) -> list[Prompt]:
    """The prompts of these numbers, but for rows that are none: the run drops them with their reason. Raises
    `DataError` where none is left."""
    found = []
    for number in numbers:
        try:
            found.append(source[int(number)])
        except DataError:
            continue
    if not found:
        raise DataError(f"prompts.train: none of {len(source)} rows that were drawn for model.warm_start can be used")
    return found
