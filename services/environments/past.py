"""What a session's object was told and has said, so that another may take its place where its process has died."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from penstock.services.environments.sessions import LOST

MOST_LOST = 20
"""A session whose worker died so often, always by another's doing, is given up: while it is told again, or where it
has to begin again."""
Answered = Callable[[dict[str, Any] | None, str], None]
"""Told what a call gave, or None and what went wrong."""
Call = Callable[[int, str, Any, Answered], Future[Any]]
"""Has a session's worker do it before all that waits there: the session, the kind of call, and what it is given."""


@dataclass(slots=True)
class Past:
    """Of one session."""

    told: list[tuple[str, Any]] = field(default_factory=list)
    """Calls in their order, the last of which may have no answer yet: the kind, and what was given."""
    found: list[dict[str, Any]] = field(default_factory=list)
    """The answers."""
    over: bool = False
    """Nobody waits for it any more."""


class Replays:
    """Objects of one worker that are made again: each is told what the one before it was. Where it says the same of
    all, rewards and pictures too, the session goes on with it, and knows nothing of this; else the session is `LOST`.
    A plain class's are made one after the other: what is made at once would be lost at once where one hangs. Called
    from the worker's thread alone."""

    def __init__(self, at_once: bool, call: Call) -> None:
        self._at_once, self._call = at_once, call
        self._waiting: deque[Callable[[], None]] = deque()
        self._busy = False

    def begin(self, session: int, past: Past, answered: Answered) -> None:
        """Makes the object of a ``session`` that ends with a call without an answer, which ``answered`` is told."""
        self._waiting.append(lambda: self._tell(session, past, 0, answered, 0))
        if self._at_once or not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._waiting)
        if self._busy:
            self._waiting.popleft()()

    def _tell(self, session: int, past: Past, place: int, answered: Answered, lost: int) -> None:
        def heard(found: dict[str, Any] | None, error: str) -> None:
            last = place + 1 == len(past.told)
            if error == LOST and lost < MOST_LOST and not past.over:
                self._tell(session, past, 0, answered, lost + 1)
                return
            if found is not None and not last and found == past.found[place] and not past.over:
                self._tell(session, past, place + 1, answered, lost)
                return
            if found is None:
                answered(None, "its worker died too often" if error == LOST else error)
            elif last:
                answered(found, "")
            else:
                answered(None, LOST)
            if past.over or not last:
                self._call(session, "close", None, lambda found, error: None)
            self._next()

        self._call(session, *past.told[place], heard)
