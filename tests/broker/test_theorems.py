"""Both theorems of docs/bounded-lag.md and docs/recovery.md under crashes, and proof that the test can fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from heapq import heappush
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from penstock.services.broker.rules.gate import Gate
from penstock.services.broker.rules.leases import Lease
from penstock.services.broker.rules.ledger import LedgerError
from tests.broker.machine import Holder, World

EXAMPLES = int(os.environ.get("PENSTOCK_EXAMPLES", "2000"))
TRANSITIONS = 80

worlds = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(0, 2), st.integers(1, 3))


def play(kind: type[World], shape: tuple[int, int, int, int], random: Any, steps: int = 16) -> World:
    """Random transitions, every property checked after each; then the run must be able to end."""
    batch, window, extra, rollouts = shape
    max_lag = -(-(window - 1) // batch) + extra
    world = kind(batch, window, max_lag, steps, rollouts)
    for _ in range(TRANSITIONS):
        transition(world, random)
        world.transitions += 1
        world.check()
        if world.trainer_version >= steps:
            break
    world.settle()
    return world


def transition(world: World, random: Any) -> None:
    holder = random.choice(world.holders)
    working = sorted(holder.work)
    unscored = sorted(n for n, e in world.groups.replay.entries.items() if e.needs)
    ready = world.groups.replay.ready()
    moves: list[tuple[int, Any]] = [
        (8, lambda: world.grant(holder)),
        (6, lambda: world.load(holder)),
        (1, lambda: world.restart_rollout(holder)),
        (1, world.restart_broker),
        (1, world.restart_trainer),
    ]
    if working:
        moves.append((8, lambda: world.finish(holder, random.choice(working))))
        moves.append(
            (2, lambda: world.expire(n) if (n := random.choice(working)) in world.groups.leases.open else None)
        )
        moves.append((1, lambda: world.drop(random.choice(working))))
    if unscored:
        moves.append((8, lambda: world.score(random.choice(unscored))))
        moves.append((1, lambda: world.drop(random.choice(unscored))))
    if ready:
        moves.append((1, lambda: world.drop(random.choice(ready))))
        moves.append((1, lambda: world.say_twice(random.choice(ready))))
    if world.taken is None:
        moves.append((8, world.take))
    elif world.pending is None:
        moves.append((8, world.train))
    if world.pending is not None:
        moves.append((8, world.commit))
    elif world.trainer_version:
        moves.append((4, world.publish))
        if world.taken is None:
            moves.append((2, world.save))
    weights = [weight for weight, _ in moves]
    move = random.choices(moves, weights)[0][1]
    if random.random() < 0.03 and move not in (world.train, world.restart_broker, world.restart_trainer):
        world.torn(move)
    else:
        move()


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(shape=worlds, random=st.randoms(use_true_random=True))
def test_no_token_is_too_old_no_group_is_lost_or_trained_twice_and_nothing_stalls(shape: Any, random: Any) -> None:
    play(World, shape, random)


class RawNumbers(World):
    """The gate counts numbers, not ranks."""

    def make_gate(self, batch: int, window: int, max_lag: int) -> Gate:
        class Raw(Gate):
            def rank(self, number: int) -> int:
                return number

        return Raw(batch, window, max_lag)


class RepeatedGrantUnchecked(World):
    """A lease that is given again is given to anybody."""

    def grant(self, holder: Holder) -> bool:
        lease = self.groups.leases.waiting()
        if lease is None:
            return super().grant(holder)
        self.groups.leases.grant(lease, holder.identity, 0.0)
        self.journal.commit()
        holder.work[lease.number] = holder.version
        return True


class Uncharging:
    """The gate forgets that W - 1 later groups may be trained first."""

    def make_gate(self, batch: int, window: int, max_lag: int) -> Gate:
        class Uncharged(Gate):
            def last_step(self, number: int) -> int:
                return self.steps + (self.rank(number) - self.groups) // self.batch

        return Uncharged(batch, window, max_lag)


class NoChargeForTheWindow(Uncharging, World):
    """See `Uncharging`."""


class NumberGivenAgain(World):
    """A dropped group's number is used for another group."""

    def drop(self, number: int) -> None:
        super().drop(number)
        self.groups.leases.open[number] = Lease(number, 0)
        self.groups.leases.open = dict(sorted(self.groups.leases.open.items()))
        heappush(self.groups.leases._sound, number)
        self.journal.commit()


class Remembering(World):
    """A rollout that was started again is still thought to serve what it served before."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.remembered: dict[str, int] = {}

    def believed_version(self, holder: Holder) -> int:
        self.remembered[holder.name] = max(self.remembered.get(holder.name, -1), holder.version)
        return self.remembered[holder.name]


class OldIncarnation(Remembering):
    """See `Remembering`."""

    def restart_rollout(self, holder: Holder) -> None:
        super().restart_rollout(holder)
        holder.version = 0  # it has loaded its checkpoint, which is the starting model


class Unlooked(World):
    """The broker does not look at how old a finished group is."""

    def said(self, oldest: int) -> int:
        return -1


class OldIncarnationBelieved(Unlooked, OldIncarnation):
    """And nobody looks at what comes back."""


class ArrivalOrder(World):
    """A step takes what is ready first, not what is numbered first."""

    def make_gate(self, batch: int, window: int, max_lag: int) -> Gate:
        class Arrival(Gate):
            def eligible(self, ready: Any, oldest_open: int) -> list[int]:
                return list(ready)

        return Arrival(batch, window, max_lag)


class TakeNotDurable(World):
    """A take is acted upon before it is durable; now and then a crash of the broker forgets it."""

    takes = 0

    def take(self) -> bool:
        taken = self.groups.take(self.trainer_version, 0)
        if taken is None:
            return False
        self.taken = taken
        self.takes += 1
        if self.takes % 3 or taken.digest is not None or self.pending is not None:
            self.journal.commit()
            return True
        self.train()
        self.restart_broker()
        self.groups.ledger.take(taken.step, [], 0, 0, 0.0)
        self.commit()
        return False


class CommitAfterPublish(World):
    """A version is published before its step is committed; the trainer dies in between, and what is redone differs."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.served: dict[int, int] = {}
        self.made = 0

    def commit(self) -> None:
        self.made += 1
        self.served.setdefault(self.trainer_version, self.made)
        if self.made % 3 == 0:  # dies here
            self.restart_trainer()
            return
        assert self.served[self.trainer_version] == self.made, "two weights were served under one version"
        super().commit()


MUTATIONS = [
    (RawNumbers, "stalled"),
    (RepeatedGrantUnchecked, "has lag"),
    (NoChargeForTheWindow, "has lag"),
    (NumberGivenAgain, "has lag|can be leased|in two steps"),
    (OldIncarnationBelieved, "has lag"),
    (ArrivalOrder, "has lag"),
    (TakeNotDurable, "was trained on|has lag|cannot be taken"),
    (CommitAfterPublish, "two weights were served"),
]


def must_break(play_it: Callable[[Any, Any], Any], reason: str) -> None:
    """Some play ends as ``reason`` says."""

    @settings(
        max_examples=3000,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(shape=worlds, random=st.randoms(use_true_random=True))
    def broken(shape: Any, random: Any) -> None:
        play_it(shape, random)

    with pytest.raises((AssertionError, LedgerError), match=reason):
        broken()


@pytest.mark.parametrize(("mutation", "reason"), MUTATIONS)
def test_every_clause_is_needed(mutation: type[World], reason: str) -> None:
    must_break(partial(play, mutation), reason)


@settings(max_examples=EXAMPLES // 8, deadline=None, suppress_health_check=list(HealthCheck))
@given(shape=worlds, random=st.randoms(use_true_random=True))
def test_a_look_at_what_comes_back_suffices_where_a_rollout_is_not_what_it_was_thought_to_be(
    shape: Any, random: Any
) -> None:
    play(OldIncarnation, shape, random)


def test_plays_are_long_and_at_least_half_of_them_crash() -> None:
    import random

    plays = [play(World, (2, 2, 1, 2), random.Random(seed)) for seed in range(60)]
    assert sum(world.crashes > 0 for world in plays) >= 30
    assert min(world.transitions for world in plays) >= 50
