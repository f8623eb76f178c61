"""Finished groups: scored, ready, taken, freed.

finished ──▶ unscored ──(every scorer has answered)──▶ ready ──▶ taken by a step ──▶ freed once a durable
                │                                        │                           checkpoint covers the step
                └────────────▶ dropped ◀─────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from services.broker.leases import Journal

Scorer = Literal["reward", "reference"]


@dataclass(slots=True)
class Entry:
    """One finished group that no step has taken."""

    number: int
    draw: int
    needs: set[Scorer] = field(default_factory=set)
    """Scorers that have not answered yet."""
    offers: dict[Scorer, str] = field(default_factory=dict)
    """Scorer to the identity that works on it."""
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
            self.entries[row["number"]] = Entry(row["number"], row["draw"], set(row["needs"]))

    def add(self, number: int, draw: int) -> Entry:
        """A group is finished and durable."""
        entry = Entry(number, draw, set(self._scorers))
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

    def offer(self, entry: Entry, scorer: Scorer, holder: str) -> None:
        """``holder`` works on it."""
        entry.offers[scorer] = holder
        entry.attempts[scorer] = entry.attempts.get(scorer, 0) + 1

    def withdraw(self, holder: str) -> list[tuple[Entry, Scorer]]:
        """``holder`` is gone: what it worked on is offered again."""
        withdrawn = [(e, s) for e in self.entries.values() for s, h in e.offers.items() if h == holder]
        for entry, scorer in withdrawn:
            del entry.offers[scorer]
        return withdrawn

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
        row = {"number": entry.number, "draw": entry.draw, "needs": sorted(entry.needs)}
        self._journal.put(self.TABLE, entry.number, row)
