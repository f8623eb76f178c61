"""Turns of agents that wait for the policy's answer, and who is at work on them. Pure.

asked ──▶ waiting ◀──────────── expired, holder gone
             │ grant                 │
             ▼                       │
          at work ───────────────────┘
             │ answered, once; or its group has ended
             ▼
           (gone)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.services.broker.rules.holds import Holds

Group = tuple[str, int]
"""Purpose and number."""


@dataclass(slots=True, eq=False)
class Turn:
    """One turn that nobody has answered yet."""

    id: int
    group: Group
    key: Hashable
    """What it is, however often it is asked for."""
    session: Hashable
    """Turns of the same one had better be answered by the same rollout."""
    request: Any
    """Whatever whoever answers must know."""
    asked_by: tuple[str, int]
    """Identity and request number of who waits for the answer."""
    attempt: int = 0
    note: bytes = b""
    """Whoever asks wants it kept with the answer."""


class Turns:
    """All of them, in the order in which they were asked for. Not durable: whoever waits asks again.

    ``first_id``: of a broker that was started again, beyond all of the one before.
    """

    def __init__(self, first_id: int = 1) -> None:
        self._next = first_id
        self.open: dict[int, Turn] = {}
        """By id."""
        self._by_key: dict[Hashable, Turn] = {}
        self.holds: Holds[int] = Holds(lambda id: id, lambda id: None)
        self._last: dict[Group, dict[Hashable, str]] = {}
        """By group: session to who answered it last."""
        self._of: dict[Group, dict[int, Turn]] = {}
        """By group: its turns, by id."""
        self._unwanted: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self.open)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self.open.values())

    def ask(self, group: Group, key: Hashable, session: Hashable, request: Any, asked_by: tuple[str, int]) -> Turn:
        """Somebody waits for a turn. One that is open already gets a new asker, and is done over where it is not the
        same ``request``."""
        turn = self._by_key.get(key)
        if turn is not None and turn.request == request:
            turn.asked_by = asked_by
            return turn
        if turn is not None:
            self._forget(turn)
        turn = Turn(self._next, group, key, session, request, asked_by)
        self._next += 1
        self.open[turn.id] = self._by_key[key] = turn
        self._of.setdefault(group, {})[turn.id] = turn
        return turn

    def get(self, id: int) -> Turn | None:
        """The open turn of this id."""
        return self.open.get(id)

    def waiting(self) -> Iterator[Turn]:
        """Those that nobody is at work on, the longest first."""
        return (turn for turn in list(self.open.values()) if turn.id not in self.holds.held)

    def last_holder(self, turn: Turn) -> str | None:
        """Who answered the session's turn before."""
        return self._last.get(turn.group, {}).get(turn.session)

    def grant(self, turn: Turn, holder: str, deadline: float) -> None:
        """``holder`` answers it, until ``deadline``."""
        self.holds.take(turn.id, holder, deadline)
        self._last.setdefault(turn.group, {})[turn.session] = holder
        turn.attempt += 1

    def give_back(self, id: int) -> None:
        """Its holder does not go on: it waits, and the grant does not count."""
        self.open[id].attempt -= 1
        self.holds.free(id)

    def answered(self, id: int, by: str = "") -> None:
        """It is answered, ``by`` whom; or was already, or is wanted no more."""
        turn = self.open.get(id)
        if turn is not None:
            if (hold := self.holds.held.get(id)) and hold.holder == by:
                self.holds.free(id)  # another one may be at it, and is told that it is of no use any more
            self._forget(turn)

    def end(self, group: Group) -> None:
        """Nobody waits for turns of this group any more."""
        for turn in list(self._of.get(group, {}).values()):
            self._forget(turn)
        self._last.pop(group, None)

    def unwanted(self) -> dict[str, list[int]]:
        """What has become of no use, by who is at work on it; each is told once."""
        found, self._unwanted = self._unwanted, {}
        return found

    def _forget(self, turn: Turn) -> None:
        if hold := self.holds.held.get(turn.id):
            self._unwanted.setdefault(hold.holder, []).append(turn.id)
        self.holds.done(turn.id)
        del self.open[turn.id]
        del self._by_key[turn.key]
        of_group = self._of[turn.group]
        del of_group[turn.id]
        if not of_group:
            del self._of[turn.group]
