"""The course of a run's evaluations: which was the best, and for how many there has been no better one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Best(NamedTuple):
    """Of the evaluations so far."""

    step: int
    """Steps that were trained before it."""
    score: float
    since: int
    """How many evaluations have come after it without a better one."""


def best_of(evaluations: Iterable[tuple[int, float]], margin: float = 0.0) -> Best | None:
    """The best of (step, score) pairs in their order, where a better one is better by more than ``margin``; None of
    none.

    >>> best_of([(0, 0.1), (10, 0.5), (20, 0.505), (30, 0.4)], margin=0.01)
    Best(step=10, score=0.5, since=2)
    """
    best: Best | None = None
    for step, score in evaluations:
        if best is None or score > best.score + margin:
            best = Best(step, score, 0)
        else:
            best = best._replace(since=best.since + 1)
    return best
