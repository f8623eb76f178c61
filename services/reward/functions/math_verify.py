"""Mathematics by meaning: the ``math-verify`` library parses LaTeX and numbers, and compares what they are worth."""

import re
from fractions import Fraction
from functools import cache, partial
from itertools import product
from typing import Any

from penstock.services.data import need
from penstock.services.reward.truth import as_text
from penstock.services.runtime.boxes import boxes

_MARKED = re.compile(r"\$|\\boxed|\\[(\[]")
"""The truth says itself where its formula is."""
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^}]*\}")
_MANTISSA = r"(?<![\w.,^/}])(\d{1,99}(?:\.\d{1,99})?)"
_SCIENTIFIC = re.compile(rf"{_MANTISSA}[eE]([+-]?\d{{1,3}})(?!\w|\.\d)")
_POWER_OF_TEN = re.compile(
    rf"{_MANTISSA}\s*\\(?:times|cdot)\s*10\s*\^\s*(?:(\d)|{{\s*([+-]?\d{{1,3}})\s*}})(?!\w|\^|\.\d)"
)
_WORD = re.compile(r"(?<!\S)(?!(?:and|or)\b)(?:[A-Za-z]{3,}(?![^\s.,:;!?])|(?<=\d )[A-Za-z]{2,})")
"""A sentence's, or a unit, which in a formula would be a product of its letters."""
_PASSED_OVER = re.compile(r"\\(?:text|quad|[ ,;!()\[\]])|[A-Za-z](?:_\{?\w+\}?)?\s*=|[\s${}]")
"""Between two boxes: spaces, the ends of formulas, and what the second one is called."""
_JOINED = (",", ";", "and", "or", ",and", ",or")


@cache
def _library() -> Any:
    need("math_verify", "math", "reward.functions")
    import math_verify

    return math_verify


def math_verify(response: str, truth: Any, digits: int = 6) -> float:
    """1.0 where the answer in ``response`` (the last ``\\boxed{}``, or the last ones that a comma, "and" or "or" joins,
    else its last formula or number) equals ``truth``, which is LaTeX, with or without dollars, or text with a formula
    or a number: ``\\frac{1}{2}`` equals 0.5. Numbers are compared to ``digits`` decimal places. What cannot be parsed
    is no answer: 0.0."""
    library, said = _library(), as_text(truth)
    wanted = _parsed_truth(library, said)
    if not wanted:
        raise ValueError(f"the truth is no mathematics: {said[:80]!r}")
    answer = _exact(_POWER_OF_TEN, _from_last_box(response))
    readings = dict.fromkeys([answer, _exact(_SCIENTIFIC, answer)])  # 2e-1 may be 0.2, and twice Euler's number less 1
    found = [part for reading in readings for part in library.parse(reading, parsing_timeout=None)]
    return float(any(_same(library, *pair, digits) for pair in product(wanted, found)))


def _parsed_truth(library: Any, truth: str) -> list[Any]:
    """As a formula, all of it, unless it marks its own or has words; else what the library finds in it."""
    truth = _exact(_POWER_OF_TEN, truth)
    if _SCIENTIFIC.fullmatch(truth.strip().lstrip("+-")):  # its e would be Euler's number
        truth = _exact(_SCIENTIFIC, truth)
    # The library's own deadlines are signals; a call here has `timeout_s`.
    whole = partial(library.parse, f"${truth}$", parsing_timeout=None)
    formula = not _MARKED.search(truth) and not _WORD.search(_TEXT.sub("", truth))
    wanted: list[Any] = whole() if formula else []
    if all(isinstance(part, str) for part in wanted):
        wanted = library.parse(_from_last_box(truth), parsing_timeout=None) or wanted
    if all(isinstance(part, str) for part in wanted):
        wanted = whole() or wanted
    return wanted


def _exact(numbers: re.Pattern[str], text: str) -> str:
    """With a whole number or a fraction for each of ``numbers``, a mantissa and an exponent: the library would round
    them."""

    def written(found: re.Match[str]) -> str:
        mantissa, *exponents = filter(None, found.groups())
        value = Fraction(f"{mantissa}e{exponents[0]}")
        return f"\\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value)

    return numbers.sub(written, text)


def _same(library: Any, wanted: Any, found: Any, digits: int) -> bool:
    """What the library says; to it no whole number is ever equal to one that is rounded."""
    from sympy import Float, Integer

    if isinstance(wanted, Integer) and isinstance(found, Float):
        wanted = Float(str(wanted))
    elif isinstance(wanted, Float) and isinstance(found, Integer):
        found = Float(str(found))
    return library.verify(wanted, found, float_rounding=digits, timeout_seconds=None)


def _from_last_box(text: str) -> str:
    """Without the boxes before the last, for the library makes a set of all; those that are joined to it stay."""
    start, before = 0, None
    for box in boxes(text):
        if before and _PASSED_OVER.sub("", text[before.stop : box.start]) not in _JOINED:
            start = before.stop
        before = box
    return text[start:]
