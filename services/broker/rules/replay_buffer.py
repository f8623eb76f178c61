"""Finished groups: scored, ready, taken, freed.

finished ──▶ unscored ──(every column is there)──▶ ready ──▶ taken by a step ──▶ freed once a durable
                │                                    │                           checkpoint covers the step
                └────────────▶ dropped ◀─────────────┘
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from penstock.protocols.columns import Column
from penstock.services.broker.rules.holds import SUSPECT_AFTER, Holds
from penstock.services.broker.rules.journal import Journal


@dataclass(slots=True)
class Entry:
    """One finished group that no step has taken."""

    number: int
    draw: int
    oldest: int
    """The lowest version among its tokens."""
    trajectories: int
    tokens: int
    """Of all trajectories together."""
    source: str = ""
    """Of its prompt: which columns it is asked for."""
    needs: set[str] = field(default_factory=set)
    """Columns that are not there yet."""
    attempts: dict[str, int] = field(default_factory=dict)
    """How often each column was asked for."""
    refused: dict[str, str] = field(default_factory=dict)
    """Who has said that it cannot write a column for the group."""


def attempts_of(entry: Entry, columns: Sequence[Column]) -> int:
    """How often that one of ``columns`` was asked for that was asked for most."""
    return max(entry.attempts.get(column.name, 0) for column in columns)


class Replay:
    """The finished groups that no step has taken, by number. Of ``columns`` each of them needs those that are asked of
    its source; ``source_of`` says which one that is of a group whose row does not."""

    TABLE = "replay"

    def __init__(
        self, journal: Journal, columns: Sequence[Column], source_of: Callable[[int], str] = lambda number: ""
    ) -> None:
        self._journal, self._by_source = journal, any(column.sources for column in columns)
        self._columns = {column.name: column for column in columns}
        self.entries: dict[int, Entry] = {}
        self.holds: Holds[tuple[int, str]] = Holds(lambda key: key[0], lambda key: self._want(*key))
        self._wanting: dict[str, list[int]] = {column.scorer: [] for column in columns}
        """Numbers, as heaps, of the groups that a scorer may have columns to write for, and some it has not."""
        self._wanting_alone: dict[str, list[int]] = {column.scorer: [] for column in columns}
        """Of those, the suspects."""
        self._given_alone: dict[str, set[int]] = {column.scorer: set() for column in columns}
        """Suspects that somebody had, and may have yet."""
        self._ready: list[int] = []
        self._unready: list[int] = []
        """A heap; it may hold numbers that are ready, or gone, by now."""
        for row in sorted(journal.rows(self.TABLE).values(), key=lambda row: row["number"]):
            # A resumed run may have other scorers: what is waited for are the columns that it has now.
            has = set(row.pop("has"))
            if "source" not in row:
                row["source"] = source_of(row["number"])
            self._enter(Entry(**row, needs=self._asked(row["source"]) - has))

    def add(self, number: int, draw: int, oldest: int, trajectories: int, tokens: int, source: str = "") -> Entry:
        """A group is finished and durable."""
        entry = Entry(number, draw, oldest, trajectories, tokens, source, self._asked(source))
        self._enter(entry)
        self._write(entry)
        return entry

    def ready(self) -> list[int]:
        """Numbers of the groups that have every column, ascending."""
        return self._ready

    def oldest_unready(self) -> int | None:
        """The lowest number that still waits for a column."""
        while self._unready and self._is_ready(self._unready[0]):
            heappop(self._unready)
        return self._unready[0] if self._unready else None

    def unready(self) -> int:
        """How many groups wait for a column."""
        return len(self.entries) - len(self._ready)

    def unoffered(self, scorer: str) -> Iterator[tuple[Entry, list[Column]]]:
        """Groups with columns that ``scorer`` could write now and that nobody works on, but for suspects, lowest
        number first. Each is to be offered, or left at the end."""
        return self._open_of(self._wanting.get(scorer, []), scorer, self._wanting_alone.get(scorer, []))

    def suspects(self, scorer: str) -> Iterator[tuple[Entry, list[Column]]]:
        """As `unoffered`: those that were offered so often without an answer that they may be why there was none."""
        wanting, alone = self._wanting.get(scorer, []), self._wanting_alone.get(scorer, [])
        next(self._open_of(wanting, scorer, alone), None)  # those that come first are sorted out
        return self._open_of(alone, scorer)

    def alone(self, scorer: str) -> set[str]:
        """Processes of ``scorer`` that have a suspect, and should get nothing beside it."""
        given = self._given_alone.get(scorer, set())
        held = {
            (number, name): self.holds.holder((number, name))
            for number in given
            for name, column in self._columns.items()
            if column.scorer == scorer
        }
        given.intersection_update({number for (number, _), holder in held.items() if holder})
        return {holder for holder in held.values() if holder}

    def _open_of(
        self, heap: list[int], scorer: str, aside: list[int] | None = None
    ) -> Iterator[tuple[Entry, list[Column]]]:
        """Of ``heap``; suspects are put ``aside``."""
        while heap:
            entry = self.entries.get(heap[0])
            columns = self._open_columns(entry, scorer) if entry else []
            if entry and columns and aside is not None and attempts_of(entry, columns) >= SUSPECT_AFTER:
                heappush(aside, heappop(heap))
                continue
            if entry and columns:
                yield entry, columns
            if heap and (not entry or not self._open_columns(entry, scorer)):
                heappop(heap)
            elif entry and columns:
                return

    def offer(self, entry: Entry, columns: Sequence[Column], holder: str, deadline: float) -> None:
        """``holder`` writes them."""
        for column in columns:
            self.holds.take((entry.number, column.name), holder, deadline)
            entry.attempts[column.name] = entry.attempts.get(column.name, 0) + 1
            if entry.attempts[column.name] > SUSPECT_AFTER:
                self._given_alone[column.scorer].add(entry.number)

    def refuse(self, entry: Entry, column: str, by: str, most: int) -> bool:
        """``by``, which works on it, says that nobody can write ``column`` for it. True where that is so: it was said
        before, or there are no more of ``most`` attempts; else it is offered once more, since it may be that process
        that cannot. False of a repeated answer, too."""
        holder = self.holds.holder((entry.number, column))
        if holder not in (by, None) or (holder is None and entry.refused.get(column) == by):
            return False
        if column in entry.refused or entry.attempts.get(column, 0) >= most:
            return True
        entry.refused[column] = by
        self.holds.free((entry.number, column))
        return False

    def wants(self, number: int, column: str) -> Entry | None:
        """The group, if it still waits for ``column``; None for a repeated answer, or for a group that is gone."""
        entry = self.entries.get(number)
        return entry if entry and column in entry.needs else None

    def scored(self, number: int, column: str) -> bool:
        """``column`` is there. False where that was known, or the group is gone: a repeated answer."""
        entry = self.wants(number, column)
        if entry is None:
            return False
        entry.needs.discard(column)
        self.holds.done((number, column))
        if not entry.needs:
            insort(self._ready, number)
        for reader in self._columns.values():
            if column in reader.reads and reader.name in entry.needs:
                self._want(number, reader.name)
        self._write(entry)
        return True

    def remove(self, number: int) -> Entry | None:
        """The group is taken or dropped."""
        entry = self.entries.pop(number, None)
        if entry:
            for column in entry.needs:
                self.holds.done((number, column))
            place = bisect_left(self._ready, number)
            if place < len(self._ready) and self._ready[place] == number:
                del self._ready[place]
            self._journal.delete(self.TABLE, number)
            if not self.entries:
                self._unready.clear()
        return entry

    def _enter(self, entry: Entry) -> None:
        self.entries[entry.number] = entry
        if entry.needs:
            heappush(self._unready, entry.number)
            for column in entry.needs:
                self._want(entry.number, column)
        else:
            insort(self._ready, entry.number)

    def _asked(self, source: str) -> set[str]:
        return {name for name, column in self._columns.items() if column.asked(source)}

    def _is_ready(self, number: int) -> bool:
        entry = self.entries.get(number)
        return entry is None or not entry.needs

    def _open_columns(self, entry: Entry, scorer: str) -> list[Column]:
        """What ``scorer`` could write for the group now."""
        return [
            self._columns[name]
            for name in sorted(entry.needs)
            if self._columns[name].scorer == scorer
            and (entry.number, name) not in self.holds.held
            and not entry.needs.intersection(self._columns[name].reads)
        ]

    def _want(self, number: int, column: str) -> None:
        heappush(self._wanting[self._columns[column].scorer], number)

    def _write(self, entry: Entry) -> None:
        row: dict[str, Any] = {"number": entry.number, "draw": entry.draw, "oldest": entry.oldest}
        row |= {"trajectories": entry.trajectories, "tokens": entry.tokens}
        if self._by_source:  # else nobody has looked for it, and a resumed run may
            row["source"] = entry.source
        self._journal.put(self.TABLE, entry.number, {**row, "has": sorted(self._asked(entry.source) - entry.needs)})
