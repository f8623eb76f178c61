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

from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from typing import Any, Protocol


class Journal(Protocol):
    """What `store.Store` offers to the rules: rows that become durable with the turn."""

    def put(self, table: str, key: str | int, row: dict[str, Any]) -> None:
        """Writes one row."""

    def delete(self, table: str, key: str | int) -> None:
        """Removes one row."""

    def rows(self, table: str) -> dict[str, dict[str, Any]]:
        """All committed rows of a table."""


@dataclass(slots=True)
class Lease:
    """One unfinished group."""

    number: int
    draw: int
    """Which draw from the prompt stream it answers."""
    attempt: int = 0
    """How often it was granted."""
    holder: str | None = None
    """Identity of the rollout that generates it; None while it waits."""
    deadline: float = 0.0
    """Wall-clock seconds after which the lease expires."""


class Leases:
    """The unfinished groups, by number."""

    TABLE = "leases"

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.next_number = 0
        self.next_draw = 0
        self.open: dict[int, Lease] = {}
        for row in journal.rows(self.TABLE).values():
            self.open[row["number"]] = Lease(**row)
        self.open = dict(sorted(self.open.items()))
        # Numbers of the groups that nobody generates, and some that somebody does by now.
        self._waiting = [lease.number for lease in self.open.values() if lease.holder is None]
        counters = journal.rows("counters").get(self.TABLE)
        if counters:
            self.next_number, self.next_draw = counters["next_number"], counters["next_draw"]

    def new(self) -> Lease:
        """A group with the next number for the next prompt. Numbers are never used again."""
        lease = Lease(self.next_number, self.next_draw)
        self.next_number += 1
        self.next_draw += 1
        self.open[lease.number] = lease
        heappush(self._waiting, lease.number)
        self._write_counters()
        self._write(lease)
        return lease

    def waiting(self) -> Lease | None:
        """The lowest-numbered group that nobody generates."""
        while self._waiting:
            lease = self.open.get(self._waiting[0])
            if lease and lease.holder is None:
                return lease
            heappop(self._waiting)
        return None

    def grant(self, lease: Lease, holder: str, deadline: float) -> None:
        """``holder`` generates the group until ``deadline``."""
        lease.holder, lease.deadline = holder, deadline
        lease.attempt += 1
        self._write(lease)

    def renew(self, holder: str, holding: set[int], deadline: float) -> None:
        """A heartbeat of ``holder``, which works on the groups ``holding``: a lease whose message was lost is not
        renewed. Deadlines need not survive a crash: a restarted broker extends them all."""
        for number in holding & self.open.keys():
            if self.open[number].holder == holder:
                self.open[number].deadline = deadline

    def extend(self, deadline: float) -> None:
        """The broker was away: every lease has at least until ``deadline``."""
        for lease in self.open.values():
            lease.deadline = max(lease.deadline, deadline)

    def release(self, holder: str, but: set[int] | None = None) -> list[Lease]:
        """``holder`` is gone, or holds no more than the groups ``but``: the others wait again."""
        kept = but or set()
        released = [lease for lease in self.open.values() if lease.holder == holder and lease.number not in kept]
        for lease in released:
            self._wait(lease)
        return released

    def expire(self, now: float) -> list[tuple[Lease, str]]:
        """Leases past their deadline wait again; returned with who held them."""
        expired = [(x, x.holder) for x in self.open.values() if x.holder is not None and x.deadline < now]
        for lease, _ in expired:
            self._wait(lease)
        return expired

    def skip_to(self, number: int) -> None:
        """Numbers below ``number`` were given before, though the store has forgotten it."""
        if number > self.next_number:
            self.next_number = self.next_draw = number
            self._write_counters()

    def close(self, number: int) -> Lease | None:
        """The group is finished or dropped. None where it was already closed: a late or repeated answer."""
        lease = self.open.pop(number, None)
        if lease:
            self._journal.delete(self.TABLE, number)
        return lease

    def _wait(self, lease: Lease) -> None:
        lease.holder = None
        heappush(self._waiting, lease.number)
        self._write(lease)

    def _write_counters(self) -> None:
        self._journal.put("counters", self.TABLE, {"next_number": self.next_number, "next_draw": self.next_draw})

    def _write(self, lease: Lease) -> None:
        self._journal.put(self.TABLE, lease.number, asdict(lease))
