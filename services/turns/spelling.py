"""The text of single tokens, and their bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache


def spelled(
    special: Sequence[str | None], marks: Sequence[str], texts: Sequence[str]
) -> list[tuple[str, bytes | None]]:
    """Of the tokens of a row their own text, and the UTF-8 bytes that each adds to the text of the row. ``special``:
    the text of each that is no text; ``marks``: what the vocabulary calls each; ``texts``: each decoded alone."""
    found: list[tuple[str, bytes | None]] = []
    begun = False
    for own, mark, text in zip(special, marks, texts, strict=True):
        if own is not None:
            found.append((own, b""))
            continue
        spaced = (mark or "").replace("▁", " ")
        if begun and spaced == f" {text}":  # which is left out where a text begins
            text = spaced
        found.append((text, _bytes_of(mark) if "\ufffd" in text else text.encode()))
        begun = True
    return found


def _bytes_of(mark: str) -> bytes | None:
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
