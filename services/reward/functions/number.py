"""1 where the last number of the response is the truth's last number: GSM8K and its like."""

import re
from typing import Any

from penstock.services.reward.truth import as_text

_NUMBER = re.compile(
    r"((?<!\w)-)?(?:(?<=-)\\?[$€£¥₹])?((?:\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"
)
"""A sign stands behind no digit or letter, where it would be a minus; a comma stands before three digits, or two before
such (1,00,000); a currency may stand behind the sign."""


def number(response: str, truth: Any, tolerance: float = 1e-6) -> float:
    """1.0 where the last numbers of both texts agree within ``tolerance``, else 0.0. A ``####`` is not needed."""
    said = as_text(truth)
    found, expected = _last(response), _last(said)
    if expected is None:
        raise ValueError(f"the truth has no number: {said[:80]!r}")
    return float(found is not None and abs(found - expected) <= tolerance)


def _last(text: str) -> float | None:
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-").replace("{,}", ","))
    return float("".join(numbers[-1]).replace(",", "")) if numbers else None
