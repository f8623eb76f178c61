"""A run that is stopped and goes on with another batch, window and bound: no token is older than the bound of its step,
and the run comes to its end."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.services.broker.rules.gate import Gate
from penstock.services.broker.rules.groups import GroupTracker
from tests.broker.machine import COLUMN, COLUMNS, Memory

STEPS = 12


def gates() -> st.SearchStrategy[tuple[int, int, int]]:
    """Batch, window and bound, as the config allows them."""
    return st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(0, 2)).map(
        lambda given: (given[0], given[1], -(-(given[1] - 1) // given[0]) + given[2])
    )


def tracker(journal: Memory, gate: tuple[int, int, int]) -> GroupTracker:
    def nothing(*_: Any) -> None:
        return None

    return GroupTracker(journal, Gate(*gate), COLUMNS, STEPS, None, None, nothing, nothing)


def play(groups: GroupTracker, born: dict[int, int], chance: random.Random, until: int, scored: set[int]) -> None:
    """Rollouts, a scorer and a trainer move in any order. ``born``: the oldest version of each group's tokens."""
    for _ in range(4000):
        version = groups.ledger.committed
        if version >= until:
            return
        moves = []
        if (lease := groups.next_lease(version)) is not None:
            moves.append("grant")
        working = [number for number in groups.leases.open if number in groups.leases.holds.held]
        moves += ["finish"] * bool(working)
        unscored = [n for n in groups.replay.entries if n not in scored]
        moves += ["score"] * bool(unscored)
        if groups.ledger.taken(version) or (groups.ledger.may_take and groups.take(groups.ledger.length, 0)):
            moves.append("train")
        assert moves, "stalled"
        move = chance.choice(moves)
        if move == "grant" and lease is not None:
            groups.leases.grant(lease, "rollout-0#1", 1e18)
            born[lease.number] = chance.randint(max(0, groups.gate.required_version(lease.number)), version)
        elif move == "finish":
            groups.finish(number := chance.choice(working), born[number])
        elif move == "score":
            scored.add(number := chance.choice(unscored))
            groups.scored(number, COLUMN.name)
        elif move == "train" and (step := groups.ledger.taken(version)) is not None:
            for number in step.groups:
                assert version - born[number] <= step.max_lag, (number, born[number], step)
            groups.ledger.commit(version, step.groups, f"digest-{version}")
    assert groups.ledger.committed >= until, "it has not come to its end"


@settings(max_examples=300, deadline=None)
@given(before=gates(), after=gates(), stopped=st.integers(1, STEPS - 1), seed=st.integers(0, 2**31 - 1))
def test_the_bound_holds_whatever_it_was_before(
    before: tuple[int, int, int], after: tuple[int, int, int], stopped: int, seed: int
) -> None:
    journal, chance, scored = Memory(), random.Random(seed), set[int]()
    born: dict[int, int] = {}
    play(tracker(journal, before), born, chance, stopped, scored)
    journal.commit()
    again = tracker(journal, after)
    for number in list(again.leases.open):  # by another rollout, if at all
        again.leases.holds.free(number)
    play(again, born, chance, STEPS, scored)


def test_a_wider_window_is_not_charged_to_those_that_were_overtaken() -> None:
    journal, born, scored = Memory(), dict[int, int](), set[int]()
    groups = tracker(journal, (4, 8, 2))
    for number in range(5):
        lease = groups.next_lease(0)
        assert lease is not None
        groups.leases.grant(lease, "rollout-0#1", 1e18)
        groups.finish(number, 0)
        if number:  # the first one's score is late
            groups.scored(number, COLUMN.name)
    taken = groups.take(0, 0)
    assert taken is not None and taken.groups == [1, 2, 3, 4]
    groups.ledger.commit(0, taken.groups, "digest-0")
    journal.commit()
    again = tracker(journal, (4, 1, 0))
    assert again.drops == 1 and not again.replay.entries, "it would be trained one version late"
    play(again, born, random.Random(0), 3, scored)


def test_a_step_that_was_taken_is_trained_however_few_are_asked_for() -> None:
    journal, born, scored = Memory(), dict[int, int](), set[int]()
    groups = tracker(journal, (2, 1, 1))
    play(groups, born, random.Random(1), 2, scored)
    while groups.take(2, 0) is None:  # and one more is taken
        if lease := groups.next_lease(2):
            groups.leases.grant(lease, "rollout-0#1", 1e18)
        for number in list(groups.leases.open):
            groups.finish(number, 2)
        for number in list(groups.replay.entries):
            groups.scored(number, COLUMN.name)
    journal.commit()
    fewer = GroupTracker(journal, Gate(2, 1, 1), COLUMNS, 2, None, None, lambda _: None, lambda *_: None)
    assert not fewer.ended(2) and fewer.ended(3) and fewer.steps == 3
