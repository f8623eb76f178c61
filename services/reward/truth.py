"""What the functions that compare an answer with the truth have in common."""

from __future__ import annotations

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


def part_of(truth: Any, key: str) -> Any:
    """What a map has under ``key``, or under its names one in the other; None where it has nothing there.

    >>> part_of({"reward_model": {"ground_truth": "4"}}, "reward_model.ground_truth")
    '4'
    """
    if isinstance(truth, dict) and key in truth:
        return truth[key]
    for name in key.split("."):
        truth = truth.get(name) if isinstance(truth, dict) else None
    return truth
