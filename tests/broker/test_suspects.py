"""What may kill its holders: found among many, and taking nobody with it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from penstock.protocols.columns import Column
from penstock.services.broker.granting import Room, Suspects, alone, grant_groups
from penstock.services.broker.membership import Member
from penstock.services.broker.rules.gate import Gate
from penstock.services.broker.rules.groups import GroupTracker
from penstock.services.broker.rules.journal import Volatile
from penstock.services.broker.rules.leases import Lease
from penstock.services.broker.rules.replay_buffer import attempts_of

MOST = 5


def tracker(dropped: list[int], batch: int = 64) -> GroupTracker:
    columns = [Column(name="surprise", scorer="surprise", per="token")]
    return GroupTracker(
        Volatile(), Gate(batch, 1, 1), columns, 1000, None, None, lambda number: None,
        lambda number, reason, kind: dropped.append(number),
    )  # fmt: skip


def member(name: str, credit: int) -> Member:
    made = Member(name, name.partition("#")[0], "rollout", "host", 1, 0.0)
    made.version, made.credit = 0, credit
    return made


def granting(groups: GroupTracker) -> Callable[[int, bool], Lease | None]:
    def next_group(newest: int, sound: bool = False) -> Lease | None:
        while (lease := groups.next_lease(newest, sound)) and lease.attempt >= MOST:
            groups.drop(lease.number, "leased too often", "unanswered")
        return lease

    return next_group


@pytest.mark.parametrize("poison", [0, 37, 63])
def test_of_many_groups_the_one_that_kills_its_rollouts_is_dropped(poison: int) -> None:
    dropped: list[int] = []
    groups, deaths, turns = tracker(dropped), 0, 0
    while groups.leases.next_number < 64 or groups.leases.open.keys() & range(64):
        turns += 1
        rollouts = [member(f"rollout-{i}#{turns}", 32) for i in range(2)]

        def give(lease: Lease, to: Member) -> None:
            groups.leases.grant(lease, to.identity, 1e9)
            to.given += 1

        suspects = Suspects(rollouts[:], groups.leases.holds.holders(), MOST)
        grant_groups(groups, rollouts[:], granting(groups), give, suspects)
        for rollout in rollouts:
            held = sorted(groups.leases.holds.of(rollout.identity))
            if poison in held:
                deaths += 1
                groups.leases.holds.release(rollout.identity)
            else:
                for number in held:
                    groups.finish(number, 0)
    assert dropped == [poison]
    assert deaths == MOST and turns < 30


@pytest.mark.parametrize("poison", [0, 63])
def test_of_many_groups_the_one_that_kills_its_scorer_is_dropped(poison: int) -> None:
    dropped: list[int] = []
    groups, deaths, turns = tracker(dropped), 0, 0
    for _ in range(64):
        lease = groups.next_lease(0)
        assert lease
        groups.leases.grant(lease, "rollout-0#1", 1e9)
        groups.finish(lease.number, 0)
    while len(groups.replay.ready()) + len(dropped) < 64:
        turns += 1
        scorer = member(f"surprise-0#{turns}", 64)
        assert not groups.replay.alone("surprise")
        members = [scorer]
        suspects = Suspects(members, groups.replay.holds.holders(), MOST)
        for entry, columns in groups.replay.suspects("surprise"):
            if attempts_of(entry, columns) >= MOST:
                groups.drop(entry.number, "offered too often", "unanswered")
            elif suspects.take(attempts_of(entry, columns)):
                groups.replay.offer(entry, columns, scorer.identity, 1e9)
                scorer.given += 1
            else:
                break
        room = Room(members)
        for entry, columns in groups.replay.unoffered("surprise"):
            if not (taken := room.take()):
                break
            groups.replay.offer(entry, columns, taken.identity, 1e9)
            taken.given += 1
            room.put_back(taken)
        held = sorted(number for number, _ in groups.replay.holds.of(scorer.identity))
        if poison in held:
            deaths += 1
            groups.replay.holds.release(scorer.identity)
        else:
            for number in held:
                groups.scored(number, "surprise")
    assert dropped == [poison]
    assert deaths == MOST and turns < 60


def test_thousands_of_suspects_are_looked_at_once() -> None:
    """Two machines that went down twice, say: where no rollout is idle, the first that waits speaks for all."""
    groups = tracker([], batch=4096)
    for attempt in range(2):
        for _ in range(2000):
            lease = groups.next_lease(0)
            assert lease
            groups.leases.grant(lease, f"gone#{attempt}", 1e9)
        groups.leases.holds.release(f"gone#{attempt}")
    rollouts = [member(f"rollout-{i}#1", 100) for i in range(40)]
    given: list[int] = []

    def give(lease: Lease, to: Member) -> None:
        groups.leases.grant(lease, to.identity, 1e9)
        to.given += 1
        given.append(lease.number)

    started = time.process_time()
    for _ in range(20):
        suspected = alone(groups.leases.holds, groups.leases.open)
        here = [rollout for rollout in rollouts if rollout.identity not in suspected]
        grant_groups(groups, here, granting(groups), give, Suspects(here, groups.leases.holds.holders(), MOST))
    assert len(given) == 40 * 12, "each has an eighth of what it has room for"
    assert time.process_time() - started < 2
