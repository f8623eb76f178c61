"""1 where the response is the truth."""

from typing import Any

from penstock.services.reward.truth import as_text
from penstock.services.turns.tool_calls import answered


def exact_match(response: str, truth: Any, strip: bool = True) -> float:
    """1.0 where ``response``, but for its thoughts, equals ``truth`` as text, else 0.0; spaces at both ends do not
    count where ``strip``."""
    expected, response = as_text(truth), answered(response)
    return float((response.strip() == expected.strip()) if strip else (response == expected))
