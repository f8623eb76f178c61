"""Groups that are not finished: numbered, leased, expired and leased again, always under the same number.

new ──▶ waiting ◀──────────── expired, holder gone
           │ grant                 │
           ▼                       │
        leased ────────────────────┘
           │ finished (by any holder, once)      │ attempts used up, or failed
           ▼                                     ▼
         (replay)                             (dropped)
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from penstock.services.broker.rules.holds import SUSPECT_AFTER, Holds
from penstock.services.broker.rules.journal import Journal


@dataclass(slots=True)
class Lease:
    """One unfinished group."""

    number: int
    draw: int
    """Which draw from the prompt stream it answers."""
    attempt: int = 0
    """How often it was granted, but for those that were given back, or were under way when a broker ended."""
    granted: bool = False
    """It was granted before, whether that counts or not: something may be kept of it."""
    counts: bool = True
    """The last grant does."""

    @property
    def suspect(self) -> bool:
        """It may be what kills its holders."""
        return self.attempt >= SUSPECT_AFTER


class Leases:
    """The unfinished groups, by number."""

    TABLE = "leases"

    def __init__(self, journal: Journal, next_number: int = 0) -> None:
        self._journal = journal
        self.next_number, self.next_draw = next_number, 0
        self.open: dict[int, Lease] = {}
        self.holds: Holds[int] = Holds(lambda number: number, self._wait)
        for row in sorted(journal.rows(self.TABLE).values(), key=lambda row: row["number"]):
            held = bool(row["holder"])  # by one that may have ended with the last broker, and not by this group's doing
            attempt = row["attempt"] - held
            self.open[row["number"]] = Lease(row["number"], row["draw"], attempt, row.get("granted", True), not held)
            if row["holder"]:
                self.holds.take(row["number"], row["holder"], 0.0)
        # Numbers of the groups that nobody generates, and some that somebody does by now, or that are closed.
        free = [lease for lease in self.open.values() if lease.number not in self.holds.held]
        self._sound = [lease.number for lease in free if not lease.suspect]
        self._suspects = [lease.number for lease in free if lease.suspect]
        heapify(self._sound)
        heapify(self._suspects)
        counters = journal.rows("counters").get(self.TABLE)
        if counters:
            self.next_number, self.next_draw = counters["next_number"], counters["next_draw"]

    def new(self) -> Lease:
        """A group with the next number for the next prompt. Numbers are never used again."""
        lease = Lease(self.next_number, self.next_draw)
        self.next_number += 1
        self.next_draw += 1
        self.open[lease.number] = lease
        self._write_counters()
        self._wait(lease.number)
        return lease

    def waiting(self, sound: bool = False) -> Lease | None:
        """The lowest-numbered group that nobody generates; ``sound``: of those that are no suspects."""
        numbers = [self._first(self._sound, False), None if sound else self._first(self._suspects, True)]
        number = min((number for number in numbers if number is not None), default=None)
        return None if number is None else self.open[number]

    def _first(self, heap: list[int], suspect: bool) -> int | None:
        """Numbers in a heap may be closed by now, or held, or in the other one."""
        while heap:
            lease = self.open.get(heap[0])
            if lease and heap[0] not in self.holds.held and lease.suspect == suspect:
                return heap[0]
            heappop(heap)
        return None

    def grant(self, lease: Lease, holder: str, deadline: float) -> None:
        """``holder`` generates the group until ``deadline``."""
        self.holds.take(lease.number, holder, deadline)
        lease.attempt += 1
        lease.granted = lease.counts = True
        self._write(lease)

    def give_back(self, number: int) -> None:
        """Its holder has not begun, or does not go on: it waits, and the grant does not count."""
        self.open[number].attempt -= self.open[number].counts
        if number in self.holds.held:
            self.holds.free(number)
        else:
            self._wait(number)

    def gets_on(self, number: int) -> None:
        """Something durable has come of it: that its holders die is not its doing, so attempts are counted anew."""
        lease = self.open.get(number)
        if lease and lease.attempt > 1:
            lease.attempt = 1
            if number in self.holds.held:
                self._write(lease)
            else:
                self._wait(number)  # it waits as no suspect

    def holder(self, number: int) -> str | None:
        """Who generates the group."""
        return self.holds.holder(number)

    def skip_to(self, number: int) -> None:
        """Numbers below ``number`` were given before, though the store has forgotten it: they wait again. Which
        draws they answered is known where draws were not chosen: they went with the numbers."""
        ahead = self.next_draw - self.next_number
        found = [Lease(each, each + ahead) for each in range(self.next_number, number)]
        for lease in found:
            self.open[lease.number] = lease
            self._wait(lease.number)
        if found:
            self.next_number, self.next_draw = number, number + ahead
            self._write_counters()

    def go_to(self, draw: int) -> None:
        """The next draw is this one, which may be behind the last of all: then no new group says so."""
        if draw != self.next_draw:
            self.next_draw = draw
            self._write_counters()

    def close(self, number: int) -> Lease | None:
        """The group is finished or dropped. None where it was already closed: a late or repeated answer."""
        lease = self.open.pop(number, None)
        self.holds.done(number)
        if lease:
            self._journal.delete(self.TABLE, number)
        return lease

    def _wait(self, number: int) -> None:
        heappush(self._suspects if self.open[number].suspect else self._sound, number)
        self._write(self.open[number])

    def _write_counters(self) -> None:
        self._journal.put("counters", self.TABLE, {"next_number": self.next_number, "next_draw": self.next_draw})

    def _write(self, lease: Lease) -> None:
        row = {"number": lease.number, "draw": lease.draw, "attempt": lease.attempt, "granted": lease.granted}
        self._journal.put(self.TABLE, lease.number, row | {"holder": self.holds.holder(lease.number)})
