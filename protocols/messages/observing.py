"""What whoever watches a run asks for."""

from __future__ import annotations

from typing import Any, Literal

from penstock.protocols.messages.base import Message

Phase = Literal["starting", "evaluating_before", "training", "evaluating_after", "done", "stopping"]
"""What a broker is at, as its `Status` says."""
ENDED: tuple[Phase, ...] = ("done", "stopping")
"""Phases of a broker that ends in good order: nobody joins its run any more."""


class StatusRequest(Message):
    """observer → broker. ``whole``: with every evaluation that was made, and not the first and the newest alone."""

    whole: bool = False


class Status(Message):
    """broker → observer: the live state, as the dashboard shows it."""

    state: dict[str, Any]


class LedgerRequest(Message):
    """observer → broker: what is not in the run's files yet."""


class LedgerReply(Message):
    """broker → observer: how many steps are committed, and the finished groups that no committed step has."""

    steps: int
    untrained: list[int]


class StopRun(Message):
    """observer → broker: end the run; everything drains and exits. ``seen``: this observer has read all it wants.
    ``failed``: the run cannot go on, and ``reason`` says why."""

    reason: str
    seen: bool = False
    failed: bool = False
