"""What may kill its holders: found among many, and taking nobody with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.protocols.columns import Column
from penstock.services.broker.config import BrokerConfig
from penstock.services.broker.granting import Room, Suspects, alone, grant_groups
from penstock.services.broker.membership import Member
from penstock.services.broker.rules.gate import Gate
from penstock.services.broker.rules.groups import GroupTracker
from penstock.services.broker.rules.holds import SUSPECT_AFTER
from penstock.services.broker.rules.journal import Volatile
from penstock.services.broker.rules.leases import Lease, Leases
from penstock.services.broker.rules.replay_buffer import attempts_of
from penstock.services.broker.scheduler import Scheduler

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

        able = rollouts[:]
        grant_groups(groups, able, granting(groups), give, Suspects(able, [groups.leases.holds.holders()], MOST))
        for rollout in rollouts:
            held = sorted(groups.leases.holds.of(rollout.identity))
            suspected = [groups.leases.open[number].attempt > SUSPECT_AFTER for number in held]
            assert all(suspected) or not any(suspected), "a suspect has none beside it that is none"
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
        suspects = Suspects(members, [groups.replay.holds.holders()], MOST)
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
        grant_groups(groups, here, granting(groups), give, Suspects(here, [groups.leases.holds.holders()], MOST))
    assert len(given) == 40 * 12, "each has an eighth of what it has room for"
    assert time.process_time() - started < 2


class Broker:
    """The broker's own scheduler over the rules alone; what it leases is in ``given``, by who has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, credits: Sequence[int]) -> None:
        self.groups, self.evaluation = tracker([]), Leases(Volatile())
        self.rollouts = [member(f"rollout-{i}#1", credit) for i, credit in enumerate(credits)]
        self.given: dict[str, list[tuple[str, int]]] = {rollout.identity: [] for rollout in self.rollouts}
        state: Any = SimpleNamespace(
            members=SimpleNamespace(of_kind=lambda kind: list(self.rollouts)), serves_current=lambda rollout: True,
            groups=self.groups, progress=SimpleNamespace(phase="training"),
            evaluation=SimpleNamespace(leases=self.evaluation, round=SimpleNamespace(least=0, exact=None)),
            settings=SimpleNamespace(agents=False, broker=BrokerConfig(max_attempts=MOST)),
        )  # fmt: skip
        monkeypatch.setattr(Scheduler, "lease", self._lease)
        self.scheduler = Scheduler(state)

    def _lease(self, purpose: str, lease: Lease, rollout: Member, now: float) -> None:
        book = self.groups.leases if purpose == "train" else self.evaluation
        book.grant(lease, rollout.identity, 1e9)
        rollout.given += 1
        self.given[rollout.identity].append((purpose, lease.number))

    def ended(self, rollout: Member) -> None:
        """It has answered all that it had."""
        for purpose, number in self.given[rollout.identity]:
            (self.groups.leases if purpose == "train" else self.evaluation).close(number)
            rollout.given -= 1
        self.given[rollout.identity].clear()


def suspected(book: Leases) -> int:
    """A new one of ``book`` that was given twice in vain."""
    lease = book.new()
    for _ in range(2):
        book.grant(lease, "gone#1", 1e9)
        book.holds.free(lease.number)
    return lease.number


def test_who_is_given_sound_work_in_the_same_turn_is_idle_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(monkeypatch, [32])
    number = suspected(broker.groups.leases)
    for _ in range(10):
        broker.evaluation.new()
    (rollout,) = broker.rollouts
    broker.scheduler.grant(0.0)
    assert broker.given[rollout.identity] == [("eval", n) for n in range(10)], "and nothing more until it is idle"
    broker.ended(rollout)
    broker.scheduler.grant(0.0)
    assert broker.given[rollout.identity] == [("train", number)]


def test_while_a_suspect_of_an_evaluation_waits_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(monkeypatch, [16, 12, 8])
    broker.scheduler.grant(0.0)
    number = suspected(broker.evaluation)
    for rollout in broker.rollouts:
        rollout.credit += 4
    before = {name: len(given) for name, given in broker.given.items()}
    broker.scheduler.grant(0.0)
    after = {name: len(given) for name, given in broker.given.items()}
    waits = max(broker.rollouts, key=lambda rollout: rollout.room)
    assert after == {name: size + 4 * (name != waits.identity) for name, size in before.items()}
    broker.ended(waits)
    broker.scheduler.grant(0.0)
    assert broker.given[waits.identity] == [("eval", number)]


def test_a_suspect_that_nobody_may_answer_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(monkeypatch, [8])
    suspected(broker.evaluation)
    broker.scheduler._state.evaluation.round.least = 7  # a version that nobody serves yet
    number = suspected(broker.groups.leases)
    broker.scheduler.grant(0.0)
    assert broker.given["rollout-0#1"] == [("train", number)]


def test_what_is_a_suspect_no_more_waits_all_the_same() -> None:
    """An answer to an agent's turn comes when its gateway has died, say."""
    leases = Leases(Volatile())
    for way in (leases.gets_on, leases.give_back):
        number = suspected(leases)
        assert leases.waiting(sound=True) is None
        way(number)
        found = leases.waiting(sound=True)
        assert found and found.number == number and found.attempt == 1
        leases.close(number)
