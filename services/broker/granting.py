"""Which rollout is given which group: by the broker, and by the simulation of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from heapq import heapify, heappop, heappush

from penstock.services.broker.membership import Member
from penstock.services.broker.rules.groups import GroupTracker
from penstock.services.broker.rules.holds import Holds
from penstock.services.broker.rules.leases import Lease
from penstock.services.broker.rules.turns import Turn

SUSPECT_AFTER = 2
"""A group or a turn that was given this often without an answer is given to a rollout that holds nothing else."""


class Room:
    """Members with room, the one with the most first."""

    def __init__(self, members: list[Member]) -> None:
        self._heap = [(-member.room, member.name, member) for member in members if member.room > 0]
        heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def take(self, version: int | None = -1, exact: bool = False) -> Member | None:
        """The one with the most room of those that serve at least ``version``, or exactly that; None: of all. Who does
        not is left out from now on: what comes next asks for no less."""
        while self._heap:
            member = heappop(self._heap)[2]
            if version is None or (member.version == version if exact else member.version >= version):
                return member
        return None

    def put_back(self, member: Member) -> None:
        """It may have room for more."""
        if member.room > 0:
            heappush(self._heap, (-member.room, member.name, member))


def alone(holds: Holds[int], given: Mapping[int, Lease] | Mapping[int, Turn]) -> set[str]:
    """Who holds a suspect, of what is ``given`` by number, and should get nothing beside it."""
    return {hold.holder for number, hold in holds.held.items() if given[number].attempt > SUSPECT_AFTER}


def for_suspect(able: list[Member], busy: Set[str], waits: bool) -> Member | None:
    """Who is to hold a suspect, and nothing else: one of ``able`` that is not ``busy``; else the one with the most
    room, which is given nothing more until it is idle. Where a suspect ``waits`` for one of these already no other is
    held back: all others go on."""
    idle = next((r for r in able if r.identity not in busy), None)
    return idle or (None if waits else max(able, key=lambda r: (r.room, r.name), default=None))


def grant_groups(
    groups: GroupTracker,
    rollouts: list[Member],
    next_group: Callable[[int, Collection[int]], Lease | None],
    lease: Callable[[Lease, Member], None],
) -> None:
    """Gives groups to ``rollouts``, the one with the most room first, as far as the gate allows: ``next_group`` has the
    one that may be leased while this version is the newest served, besides those of these numbers, and ``lease`` gives
    it."""
    room = Room(rollouts)
    waiting: set[int] = set()  # for a rollout that holds nothing
    newest = max((r.version for r in rollouts), default=-1)
    while room and (due := next_group(newest, waiting)):
        required = groups.gate.required_version(due.number)
        if due.attempt >= SUSPECT_AFTER:  # it may be what kills its rollouts: now it takes nobody with it
            busy = groups.leases.holds.holders()
            able = [r for r in rollouts if r.room > 0 and r.version >= required]
            chosen = for_suspect(able, busy, bool(waiting))
            if chosen:
                rollouts.remove(chosen)
                room = Room(rollouts)
            if chosen and chosen.identity not in busy:
                lease(due, chosen)
            else:
                waiting.add(due.number)
            continue
        rollout = room.take(required)
        if rollout is None:
            return
        lease(due, rollout)
        room.put_back(rollout)
