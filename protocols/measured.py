"""What environments and agents measure beside the reward: numbers by name, of which a step's metrics have the mean as
``agent/NAME``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.protocols.columns import AGENT
from penstock.protocols.experience import Trajectory

MOST = 32
"""Of a session, or of a turn of an environment's."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def fault(metrics: Mapping[Any, Any]) -> str:
    """Why these are none; empty: they are."""
    if len(metrics) > MOST:
        return f"{len(metrics)} of them; there may be {MOST} at most"
    for name, value in metrics.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            return f"{str(name)[:80]!r}: a name is like {NAME.pattern}"
        try:
            finite = math.isfinite(value)
        except (TypeError, ValueError, OverflowError):
            finite = False
        if not finite:
            return f"{name}: {str(value)[:80]} is no finite number"
    return ""


def added(some: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """The sum of each, over what has it."""
    return {name: some.get(name, 0.0) + more.get(name, 0.0) for name in {**some, **more}}


def mean_over_sessions(measured: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """The mean of each over the sessions that have it: ``measured`` has the session of each trajectory and what it
    says, of which the last of a session counts."""
    found: dict[str, dict[int, float]] = {}
    for session, metrics in measured:
        for name, value in metrics.items():
            found.setdefault(name, {})[session] = value
    return {name: sum(values.values()) / len(values) for name, values in found.items()}


def of_answers(answers: Sequence[Trajectory], sessions: Sequence[int]) -> dict[str, float]:
    """What environments and agents have made of ``answers``, with the session of each: the mean of their ``turns``, and
    of what was measured, over sessions, as ``agent/NAME``."""
    turns = [len(answer.turns) for answer in answers if answer.turns]  # others were answered once
    found = {"turns": sum(turns) / len(turns)} if turns else {}
    measured = mean_over_sessions(zip(sessions, (answer.metrics for answer in answers), strict=True))
    return found | {f"{AGENT}{name}": value for name, value in measured.items()}
