"""Turns of agents: each is answered once, whoever asks again and whoever dies over it."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.services.broker.rules.turns import Turns

SESSIONS = [("train", number, place) for number in range(2) for place in range(2)]
HOLDERS = ["rollout-0#1", "rollout-1#1"]


class Machine(RuleBasedStateMachine):
    """What was asked and not answered is open, and waits or is held; nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.turns, self.now = Turns(), 0.0
        self.open: dict[Any, tuple[int, int]] = {}
        """Key to the turn's id and who waits for it."""
        self.ids: set[int] = set()
        self.told: set[int] = set()
        """That are said to be of no use."""

    @rule(session=st.sampled_from(SESSIONS), turn=st.integers(0, 2), request=st.integers(0, 1), asker=st.integers(0, 9))
    def ask(self, session: Any, turn: int, request: int, asker: int) -> None:
        key = (*session, turn)
        before = self.open.get(key)
        found = self.turns.ask(session[:2], key, session, request, ("gateway", asker))
        if before and self.turns.get(before[0]) is found:
            assert found.request == request
        else:
            assert found.id not in self.ids, "numbers are not used again"
            assert before is None or self.turns.get(before[0]) is None, "of two requests for one turn the last counts"
        self.ids.add(found.id)
        self.open[key] = found.id, asker

    @rule(holder=st.sampled_from(HOLDERS))
    def grant(self, holder: str) -> None:
        turn = next(self.turns.waiting(), None)
        if turn:
            self.turns.grant(turn, holder, self.now + 5)
            assert self.turns.last_holder(turn) == holder

    @rule(which=st.integers(0, 30))
    def answer(self, which: int) -> None:
        ids = sorted(self.ids)
        if not ids:
            return
        id = ids[which % len(ids)]
        wanted = {number: (key, asker) for key, (number, asker) in self.open.items()}.get(id)
        found = self.turns.get(id)
        self.turns.answered(id)
        assert self.turns.get(id) is None
        assert (found is None) == (wanted is None), "an answer counts once, and only where it is wanted"
        if found and wanted:
            assert found.asked_by == ("gateway", wanted[1]), "who asked last is told"
            del self.open[wanted[0]]

    @rule(holder=st.sampled_from(HOLDERS))
    def die(self, holder: str) -> None:
        self.turns.holds.release(holder)

    @rule()
    def wait(self) -> None:
        self.now += 3
        self.turns.holds.expire(self.now)

    @rule(number=st.integers(0, 1))
    def end(self, number: int) -> None:
        self.turns.end(("train", number))
        self.open = {key: value for key, value in self.open.items() if key[1] != number}

    @rule()
    def tell(self) -> None:
        ids = [id for ids in self.turns.unwanted().values() for id in ids]
        assert len(ids) == len({*ids}) and not self.told.intersection(ids), "once"
        assert not {number for number, _ in self.open.values()}.intersection(ids)
        self.told.update(ids)

    @invariant()
    def what_is_open_waits_or_is_held(self) -> None:
        ids = {number for number, _ in self.open.values()}
        waiting, held = [turn.id for turn in self.turns.waiting()], set(self.turns.holds.held)
        assert len(self.turns) == len(ids) and set(waiting) | held == ids and not set(waiting) & held
        assert waiting == sorted(waiting), "the longest first"


TestTurns = Machine.TestCase
TestTurns.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_end_of_a_group_is_no_matter_of_how_many_others_there_are() -> None:
    turns, compared = Turns(), []

    class Number(int):
        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return int(self) == other

        __hash__ = int.__hash__

    for number in range(1000):
        group = ("train", Number(number))
        turn = turns.ask(group, number, (*group, 0), None, ("gateway-0#1", number))
        turns.grant(turn, "rollout-0#1", 1e9)
    compared.clear()
    turns.end(("train", 500))
    assert len(turns) == 999 and len(compared) < 50
