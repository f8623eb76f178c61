"""Mathematics by meaning: the ``math-verify`` library parses LaTeX and numbers, and compares what they are worth."""

from functools import cache
from typing import Any

from penstock.services.data import need


@cache
def _library() -> Any:
    need("math_verify", "math", "reward.functions")
    import math_verify

    return math_verify


def math_verify(response: str, truth: Any, digits: int = 6) -> float:
    """1.0 where the answer in ``response`` (the last ``\\boxed{}``, else its last formula or number) equals ``truth``,
    which is LaTeX, with or without dollars, or a number: ``\\frac{1}{2}`` equals 0.5. Numbers are compared to
    ``digits`` decimal places. What cannot be parsed is no answer: 0.0."""
    library = _library()
    # The library's own deadlines are signals; a call here has `timeout_s`.
    wanted = library.parse(str(truth), parsing_timeout=None)
    if not wanted or all(isinstance(part, str) for part in wanted):
        wanted = library.parse(f"${truth}$", parsing_timeout=None) or wanted
    if not wanted:
        raise ValueError(f"the truth is no mathematics: {str(truth)[:80]!r}")
    found = library.parse(response, parsing_timeout=None)
    return float(library.verify(wanted, found, float_rounding=digits, timeout_seconds=None))
