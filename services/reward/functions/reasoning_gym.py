"""The scorer of a reasoning-gym task."""

from functools import cache
from typing import Any


@cache
def _scorer(task: str) -> Any:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)


def reasoning_gym(response: str, truth: Any) -> float:
    """The task's own score of ``response``, in [0, 1]; ``truth`` is what the ``reasoning_gym`` data source made."""
    return float(_scorer(truth["task"])(answer=response.strip(), entry=truth["entry"]))
