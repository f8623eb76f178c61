"""The bound of docs/bounded-lag.md where agents make groups: by many turns, each by any rollout, over a long time; and
proof that the test can fail."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.broker.machine import Holder, World
from tests.broker.test_theorems import (
    EXAMPLES,
    TRANSITIONS,
    Remembering,
    Uncharging,
    Unlooked,
    must_break,
    transition,
    worlds,
)

NO_TOKENS = 10**9
"""In the place of the oldest version of a group in which nothing was said yet."""


class AgentWorld(World):
    """A gateway holds all groups that are leased; rollouts answer their turns. What was answered is durable."""

    def __init__(self, batch: int, window: int, max_lag: int, steps: int, rollouts: int) -> None:
        super().__init__(batch, window, max_lag, steps, 1)
        self.rollouts = [Holder(f"rollout-{i}", 0) for i in range(rollouts)]
        self.turns: list[tuple[int, Holder, int, int]] = []
        """Under way: group, rollout, its incarnation, and the version that it had when it began."""
        self.answered = 0

    @property
    def gateway(self) -> Holder:
        return self.holders[0]

    # --- what the broker does: services/broker/agents.py --------------------------------------------------------------

    def allows(self, number: int, version: int) -> bool:
        return version >= self.groups.gate.required_version(number)

    def grant(self, holder: Holder) -> bool:
        lease = self.groups.next_lease(max((self.believed_version(r) for r in self.rollouts), default=-2))
        if lease is None:
            return False
        self.groups.leases.grant(lease, holder.identity, 0.0)
        self.journal.commit()
        holder.work.setdefault(lease.number, NO_TOKENS)
        return True

    def begin_turn(self, number: int, rollout: Holder) -> bool:
        if rollout.version < 0 or not self.allows(number, self.believed_version(rollout)):
            return False
        self.turns.append((number, rollout, rollout.incarnation, rollout.version))
        return True

    def end_turn(self, which: int) -> None:
        number, rollout, incarnation, oldest = self.turns.pop(which)
        if number in self.gateway.work and incarnation == rollout.incarnation and self.looks_again(number, oldest):
            self.gateway.work[number] = min(self.gateway.work[number], oldest)
            self.answered += 1

    def looks_again(self, number: int, oldest: int) -> bool:
        return self.allows(number, oldest)

    # --- what befalls them -------------------------------------------------------------------------------------------

    def finish(self, holder: Holder, number: int) -> None:
        if holder.work[number] == NO_TOKENS:  # its agents say something first
            if any(self.begin_turn(number, rollout) for rollout in self.rollouts):
                self.end_turn(len(self.turns) - 1)
            if holder.work[number] == NO_TOKENS:
                return
        super().finish(holder, number)

    def restart_rollout(self, holder: Holder) -> None:
        """The gateway dies: another one has its sessions, with all that was answered."""
        work = dict(holder.work)
        super().restart_rollout(holder)
        holder.work.update(work)
        holder.version = 0

    def kill_rollout(self, rollout: Holder) -> None:
        rollout.incarnation += 1
        rollout.version = -1

    def load(self, holder: Holder) -> None:
        """All of them, as when everybody is willing; one at a time in a play."""
        for rollout in self.rollouts:
            rollout.version = self.published

    def restart_broker(self) -> None:
        super().restart_broker()
        self.turns.clear()  # who waits asks again


def play(kind: type[AgentWorld], shape: tuple[int, int, int, int], random: Any, steps: int = 12) -> AgentWorld:
    """As `test_theorems.play`; half of the moves are of sessions."""
    batch, window, extra, rollouts = shape
    world = kind(batch, window, -(-(window - 1) // batch) + extra, steps, rollouts)
    for _ in range(2 * TRANSITIONS):
        if random.random() < 0.5:
            transition(world, random)
        else:
            session_move(world, random)
        world.check()
        if world.trainer_version >= steps:
            break
    world.settle()
    return world


def session_move(world: AgentWorld, random: Any) -> None:
    rollout, working = random.choice(world.rollouts), sorted(world.gateway.work)
    chance = random.random()
    if chance < 0.1:
        world.kill_rollout(rollout)
    elif chance < 0.35:
        rollout.version = world.published
    elif chance < 0.7 and working:
        world.begin_turn(random.choice(working), rollout)
    elif world.turns:
        world.end_turn(random.randrange(len(world.turns)))


@settings(max_examples=EXAMPLES // 2, deadline=None, suppress_health_check=list(HealthCheck))
@given(shape=worlds, random=st.randoms(use_true_random=True))
def test_no_token_of_any_turn_is_too_old_and_nothing_stalls(shape: Any, random: Any) -> None:
    play(AgentWorld, shape, random)


class AnybodyAnswers(Unlooked, AgentWorld):
    """A turn is given to any rollout."""

    def allows(self, number: int, version: int) -> bool:
        return True


class Forgotten(AgentWorld, Remembering):
    """See `Remembering`; it has the starting model."""

    def kill_rollout(self, rollout: Holder) -> None:
        super().kill_rollout(rollout)
        rollout.version = 0


class ForgottenAndNotLookedAtAgain(Unlooked, Forgotten):
    """And the broker does not look at what comes back, neither a turn nor a group."""

    def looks_again(self, number: int, oldest: int) -> bool:
        return True


class NoChargeForTheWindow(Uncharging, AgentWorld):
    """See `Uncharging`."""


@pytest.mark.parametrize("mutation", [AnybodyAnswers, ForgottenAndNotLookedAtAgain, NoChargeForTheWindow])
def test_every_look_is_needed(mutation: type[AgentWorld]) -> None:
    must_break(partial(play, mutation), "has lag|older than|version")


@settings(max_examples=EXAMPLES // 8, deadline=None, suppress_health_check=list(HealthCheck))
@given(shape=worlds, random=st.randoms(use_true_random=True))
def test_the_second_look_suffices_where_a_rollout_is_not_what_it_was_thought_to_be(shape: Any, random: Any) -> None:
    play(Forgotten, shape, random)


def test_plays_have_many_turns() -> None:
    import random

    plays = [play(AgentWorld, (2, 2, 1, 2), random.Random(seed)) for seed in range(40)]
    assert sum(world.answered for world in plays) > 40 * 10
    assert sum(world.crashes > 0 for world in plays) >= 20
