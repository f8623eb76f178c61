"""Which rollout is given which group: by the broker, and by the simulation of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from heapq import heapify, heappop, heappush

from penstock.services.broker.membership import Member
from penstock.services.broker.rules.groups import GroupTracker
from penstock.services.broker.rules.holds import SUSPECT_AFTER, Holds
from penstock.services.broker.rules.leases import Lease
from penstock.services.broker.rules.turns import Turn

PART = 8
"""What part of what a member has room for is given to it of suspects, and of that the next time."""


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
            if version is None or _serves(member, version, exact):
                return member
        return None

    def take_besides(self, others: Collection[str | None]) -> Member | None:
        """The one with the most room, but one of these identities only where there is no other."""
        first = self.take()
        if first is None or first.identity not in others or not self._heap:
            return first
        second = self.take()
        self.put_back(first)
        return second

    def put_back(self, member: Member) -> None:
        """It may have room for more."""
        if member.room > 0:
            heappush(self._heap, (-member.room, member.name, member))


def alone(holds: Holds[int], given: Mapping[int, Lease] | Mapping[int, Turn]) -> set[str]:
    """Who holds a suspect, of what is ``given`` by number, and should get nothing beside it."""
    return {hold.holder for number, hold in holds.held.items() if given[number].attempt > SUSPECT_AFTER}


class Suspects:
    """Gives suspects to members that hold nothing else: a part of what one has room for, next time a part of that, and
    the last time of ``most`` one alone. So what kills its holders is found among many, and takes nobody with it.

    Who is given some is no more in the list ``members``; nor is, once no other is idle, the one with the most room,
    which gets nothing until it is. ``busy`` are those that hold something, as it is by now: live views.
    """

    def __init__(self, members: list[Member], busy: Sequence[Set[str]], most: int) -> None:
        self._members, self._busy, self._most = members, busy, most
        self._hand: Member | None = None
        self._left = self._given = 0
        self.waits = False
        """One waits for a member that is idle, and all others for it."""

    @property
    def open(self) -> bool:
        """Who was given the last one may be given another."""
        return self._hand is not None and self._left > 0 and self._hand.room > 0

    def serve(self, version: int, exact: bool) -> bool:
        """Some of them with room serve at least ``version``, or exactly that."""
        hand = [self._hand] if self.open and self._hand else []
        return any(member.room > 0 and _serves(member, version, exact) for member in (*self._members, *hand))

    def take(self, attempt: int, version: int = -1, exact: bool = False) -> Member | None:
        """Who is given one that was given ``attempt`` times, of those that serve at least ``version``, or exactly that;
        None: it waits."""
        if self.open and self._hand and _serves(self._hand, version, exact):
            left = min(self._left, self._part(attempt, self._hand.room + self._given) - self._given)
            if left > 0:
                self._left, self._given = left - 1, self._given + 1
                return self._hand
        able = [member for member in self._members if member.room > 0 and _serves(member, version, exact)]
        idle = next((m for m in able if not any(m.identity in busy for busy in self._busy)), None)
        if idle:
            self._members.remove(idle)
            self._hand, self._left, self._given = idle, self._part(attempt, idle.room) - 1, 1
            return idle
        if able and not self.waits:
            self._members.remove(max(able, key=lambda member: (member.room, member.name)))
        self.waits = True
        return None

    def _part(self, attempt: int, room: int) -> int:
        last = attempt >= self._most - 1
        return 1 if last else max(1, room // PART ** (attempt - SUSPECT_AFTER + 1))


def grant_groups(
    groups: GroupTracker,
    rollouts: list[Member],
    next_group: Callable[[int, bool], Lease | None],
    lease: Callable[[Lease, Member], None],
    suspects: Suspects,
) -> None:
    """Gives groups to ``rollouts``, the one with the most room first, as far as the gate allows: ``next_group`` has the
    one that may be leased while this version is the newest served, of all or of those that are no suspects, and
    ``lease`` gives it. ``suspects``: of the same rollouts."""
    room = Room(rollouts)
    newest = max((r.version for r in rollouts), default=-1)
    # Without room a new group is not begun, but who has suspects may be given another that waits.
    while (room or (suspects.open and (waits := groups.leases.waiting(suspects.waits)) and waits.suspect)) and (
        due := next_group(newest, suspects.waits)
    ):
        required = groups.gate.required_version(due.number)
        if due.suspect:
            if chosen := suspects.take(due.attempt, required):
                lease(due, chosen)
            room = Room(rollouts)
            continue
        rollout = room.take(required)
        if rollout is None:
            return
        lease(due, rollout)
        room.put_back(rollout)


def _serves(member: Member, version: int, exact: bool) -> bool:
    return member.version == version if exact else member.version >= version
