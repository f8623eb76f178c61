"""The bytes of tokens that are no whole text."""

from __future__ import annotations

import re
from functools import cache


def bytes_of(mark: str) -> bytes | None:
    """What a token stands for that is no whole text: a byte by its number, or a letter for each byte, as GPT-2's
    tokenizer and its like have them."""
    if number := re.fullmatch(r"<0x([0-9A-F]{2})>", mark):
        return bytes.fromhex(number[1])
    letters = _letters()
    return bytes(letters[letter] for letter in mark) if letters.keys() >= set(mark) else None


@cache
def _letters() -> dict[str, int]:
    """The byte that each of GPT-2's letters stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # takes a second to import

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
