"""What the functions that compare an answer with the truth have in common."""

from typing import Any


def as_text(truth: Any) -> str:
    """The ``truth`` of a prompt as text. Raises `TypeError` where there is none, or where it is a whole row."""
    if truth is None:
        raise TypeError("it compares with the truth, and this prompt has none")
    if isinstance(truth, dict | list):
        columns = f", one of {', '.join(truth)}" if isinstance(truth, dict) else ""
        raise TypeError(
            f"it compares text, and the truth is none: set truth_key to the column with the answer{columns}"
        )
    if isinstance(truth, float) and truth.is_integer():  # of a table that has a fraction or a gap in that column
        return str(int(truth))
    return str(truth)
