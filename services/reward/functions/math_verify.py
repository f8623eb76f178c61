"""Mathematics by meaning: the ``math-verify`` library parses LaTeX and numbers, and compares what they are worth."""

import re
from decimal import Decimal
from functools import cache, partial
from typing import Any

from penstock.services.data import need
from penstock.services.reward.truth import as_text

_MARKED = re.compile(r"\$|\\boxed|\\[(\[]")
"""The truth says itself where its formula is."""
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^}]*\}")
_SCIENTIFIC = re.compile(r"[+-]?\d+(?:\.\d+)?[eE][+-]?\d{1,3}")
_WORD = re.compile(r"(?<!\S)(?!(?:and|or)\b)(?:[A-Za-z]{3,}(?![^\s.,:;!?])|(?<=\d )[A-Za-z]{2,})")
"""A sentence's, or a unit, which in a formula would be a product of its letters."""


@cache
def _library() -> Any:
    need("math_verify", "math", "reward.functions")
    import math_verify

    return math_verify


def math_verify(response: str, truth: Any, digits: int = 6) -> float:
    """1.0 where the answer in ``response`` (the last ``\\boxed{}``, else its last formula or number) equals ``truth``,
    which is LaTeX, with or without dollars, or text with a formula or a number: ``\\frac{1}{2}`` equals 0.5. Numbers
    are compared to ``digits`` decimal places. What cannot be parsed is no answer: 0.0."""
    library, said = _library(), as_text(truth)
    wanted = _parsed_truth(library, said)
    if not wanted:
        raise ValueError(f"the truth is no mathematics: {said[:80]!r}")
    found = library.parse(response, parsing_timeout=None)
    return float(library.verify(wanted, found, float_rounding=digits, timeout_seconds=None))


def _parsed_truth(library: Any, truth: str) -> list[Any]:
    """As a formula, all of it, unless it marks its own or has words; else what the library finds in it."""
    if _SCIENTIFIC.fullmatch(truth.strip()):  # its e would be Euler's number
        truth = format(Decimal(truth.strip()), "f")
    # The library's own deadlines are signals; a call here has `timeout_s`.
    whole = partial(library.parse, f"${truth}$", parsing_timeout=None)
    formula = not _MARKED.search(truth) and not _WORD.search(_TEXT.sub("", truth))
    wanted: list[Any] = whole() if formula else []
    if all(isinstance(part, str) for part in wanted):
        wanted = library.parse(truth, parsing_timeout=None) or wanted
    if all(isinstance(part, str) for part in wanted):
        wanted = whole() or wanted
    return wanted
