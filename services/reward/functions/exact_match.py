"""1 where the response is the truth."""

from typing import Any


def exact_match(response: str, truth: Any, prompt: str, strip: bool = True) -> float:
    """1.0 where ``response`` equals ``truth`` as text, else 0.0; spaces at both ends do not count where ``strip``."""
    if truth is None:
        raise TypeError("it compares with the truth, and this prompt has none")
    if isinstance(truth, dict | list):
        columns = f", one of {', '.join(truth)}" if isinstance(truth, dict) else ""
        raise TypeError(
            f"it compares text, and the truth is none: set truth_key to the column with the answer{columns}"
        )
    expected = str(truth)
    return float((response.strip() == expected.strip()) if strip else (response == expected))
