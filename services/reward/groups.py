"""Functions that see all answers to a prompt at once: what they are given, and what each answer gets of it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from penstock.services.reward.other_forms import CHAT, EXTRA, ROW

OF_GROUP = frozenset(("truth", "source", "prompt", "messages", "group", "step", ROW, CHAT, EXTRA))
"""What such a function is given once; of all else it is given a list, with one for each answer."""


def together(offered: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What it may ask for, of what a function of single answers might.

    >>> together([{"response": "a", "truth": "b"}, {"response": "b", "truth": "b"}])
    {'response': ['a', 'b'], 'truth': 'b'}
    """
    first = offered[0]
    return {name: first[name] if name in OF_GROUP else [each[name] for each in offered] for name in first}


def apart(call: Future[list[dict[str, Any]]], size: int) -> list[Future[list[float]]]:
    """The numbers of each of ``size`` answers, or why it has none, of a call that is done."""
    error = call.exception()
    found = [] if error else call.result()
    if not error and len(found) != size:
        error = ValueError(f"returned {len(found)} numbers for {size} answers")
    several: list[Future[list[float]]] = [Future() for _ in range(size)]
    for place, each in enumerate(several):
        if error:
            each.set_exception(error)
        elif "error" in found[place]:
            each.set_exception(ValueError(found[place]["error"]))
        else:
            each.set_result(found[place]["value"])
    return several
