"""Finished groups: scored, ready, taken, freed.

finished ──▶ unscored ──(every scorer has answered)──▶ ready ──▶ taken by a step ──▶ freed once a durable
                │                                        │                           checkpoint covers the step
                └────────────▶ dropped ◀─────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from penstock.services.broker.rules.leases import Journal

Scorer = Literal["reward", "reference"]


@dataclass(slots=True)
class Offer:
    """A scorer that works on a group, until a deadline (wall-clock seconds) that its heartbeats renew."""

    holder: str
    deadline: float


@dataclass(slots=True)
class Entry:
    """One finished group that no step has taken."""

    number: int
    draw: int
    oldest: int
    """The lowest version among its tokens."""
    needs: set[Scorer] = field(default_factory=set)
    """Scorers that have not answered yet."""
    offers: dict[Scorer, Offer] = field(default_factory=dict)
    """Who works on it."""
    attempts: dict[Scorer, int] = field(default_factory=dict)
    """How often it was offered to each scorer."""


class Replay:
    """The finished groups that no step has taken, by number."""

    TABLE = "replay"

    def __init__(self, journal: Journal, scorers: Iterable[Scorer]) -> None:
        self._journal = journal
        self._scorers = tuple(scorers)
        self.entries: dict[int, Entry] = {}
        for row in journal.rows(self.TABLE).values():
            self.entries[row["number"]] = Entry(row["number"], row["draw"], row["oldest"], set(row["needs"]))

    def add(self, number: int, draw: int, oldest: int) -> Entry:
        """A group is finished and durable."""
        entry = Entry(number, draw, oldest, set(self._scorers))
        self.entries[number] = entry
        self._write(entry)
        return entry

    def ready(self) -> list[int]:
        """Numbers of the groups that every scorer has answered, ascending."""
        return sorted(number for number, entry in self.entries.items() if not entry.needs)

    def oldest_unready(self) -> int | None:
        """The lowest number that still waits for a scorer."""
        return min((number for number, entry in self.entries.items() if entry.needs), default=None)

    def unoffered(self, scorer: Scorer) -> list[Entry]:
        """Groups that wait for ``scorer`` and that nobody works on, lowest number first."""
        return sorted(
            (e for e in self.entries.values() if scorer in e.needs and scorer not in e.offers), key=lambda e: e.number
        )

    def offer(self, entry: Entry, scorer: Scorer, holder: str, deadline: float) -> None:
        """``holder`` works on it."""
        entry.offers[scorer] = Offer(holder, deadline)
        entry.attempts[scorer] = entry.attempts.get(scorer, 0) + 1

    def withdraw(self, holder: str) -> list[tuple[Entry, Scorer]]:
        """``holder`` is gone: what it worked on is offered again."""
        withdrawn = [(e, s) for e in self.entries.values() for s, o in e.offers.items() if o.holder == holder]
        for entry, scorer in withdrawn:
            del entry.offers[scorer]
        return withdrawn

    def renew(self, holder: str, holding: set[int], deadline: float) -> None:
        """A heartbeat of ``holder``, which works on the groups ``holding``."""
        for number in holding & self.entries.keys():
            for offer in self.entries[number].offers.values():
                if offer.holder == holder:
                    offer.deadline = deadline

    def expire(self, now: float) -> list[tuple[Entry, str]]:
        """Offers past their deadline may be made again; returned with who held them."""
        expired = [(e, s, o) for e in self.entries.values() for s, o in e.offers.items() if o.deadline < now]
        for entry, scorer, _ in expired:
            del entry.offers[scorer]
        return [(entry, offer.holder) for entry, _, offer in expired]

    def scored(self, number: int, scorer: Scorer) -> bool:
        """``scorer`` has answered. False where that was known, or the group is gone: a repeated answer."""
        entry = self.entries.get(number)
        if entry is None or scorer not in entry.needs:
            return False
        entry.needs.discard(scorer)
        entry.offers.pop(scorer, None)
        self._write(entry)
        return True

    def remove(self, number: int) -> Entry | None:
        """The group is taken or dropped."""
        entry = self.entries.pop(number, None)
        if entry:
            self._journal.delete(self.TABLE, number)
        return entry

    def _write(self, entry: Entry) -> None:
        row = {"number": entry.number, "draw": entry.draw, "oldest": entry.oldest, "needs": sorted(entry.needs)}
        self._journal.put(self.TABLE, entry.number, row)
