"""What the functions that compare an answer with the truth have in common."""

from typing import Any


def as_text(truth: Any) -> str:
    """The ``truth`` of a prompt as text. Raises `TypeError` where there is none, or where it is a whole row."""
    if truth is None:
        raise TypeError("it compares with the truth, and this prompt has none")
    if isinstance(truth, dict | list):
        if isinstance(truth, list):
            raise TypeError("it compares text, and the truth is a list: f1 with the option exact takes several")
        raise TypeError(
            f"it compares text, and the truth is a map: set truth_key to what has the answer, one of {', '.join(truth)}"
            " (of a column of maps: COLUMN.NAME)"
        )
    if isinstance(truth, float) and truth.is_integer():  # of a table that has a fraction or a gap in that column
        return str(int(truth))
    return str(truth)
