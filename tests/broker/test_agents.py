"""What the broker keeps of agents' sessions, and who is given it: real sockets, real Redis, hand-made gateways."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.protocols import messages as m
from penstock.protocols import wire
from penstock.protocols.experience import Group, Sampling, Trajectory, as_bytes
from penstock.protocols.mailbox import RefusedError
from penstock.services.broker.agents import AgentDesk, _Wanted
from penstock.services.broker.config import BrokerConfig
from penstock.services.broker.membership import Member
from penstock.services.broker.rules.holds import SUSPECT_AFTER
from penstock.services.broker.rules.leases import Leases
from penstock.services.broker.rules.turns import Turns
from tests.broker.machine import Memory
from tests.broker.test_broker import Peer, Stage, finished
from tests.weights.channel import until


class Gateways:
    """A broker of a run with gateways, which may be started again."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self._url = folder, url
        self.stage = Stage(folder, url, agents=True)
        self.rollout = self.stage.rollout()

    def open(self, name: str, room: int = 1) -> Peer:
        gateway = self.stage.peer("gateway", name)
        gateway.box.tell(m.Credit(total=room))
        return gateway

    def restart(self) -> None:
        self.stage.close()
        self.stage = Stage(self.folder, self._url, agents=True)
        self.rollout = self.stage.rollout(incarnation="2")


@pytest.fixture
def gateways(tmp_path: Path, redis_url: str) -> Iterator[Gateways]:
    made = Gateways(tmp_path, redis_url)
    yield made
    made.stage.close()


def note(name: str, data: bytes) -> m.Note:
    return m.Note(purpose="train", number=0, name=name, data=as_bytes(data))


def asked(
    gateway: Peer, lease: m.Lease, said: str, prompt: bytes = b"1234", pictures: Sequence[bytes] = (), place: int = 0
) -> Any:
    """Turn 4 of the group's first session, or the one at ``place``; a future of its answer."""
    key = m.TurnKey(purpose="train", number=lease.number, place=place, turn=4)
    request = m.TurnRequest(
        key=key, prompt=as_bytes(prompt), sampling=lease.sampling, stream=1, note=as_bytes(said.encode()),
        pictures=[as_bytes(picture) for picture in pictures],
        sampled=as_bytes(bytes(len(prompt) // 4)) if pictures else None,
    )  # fmt: skip
    return gateway.box.ask_later(request, 10)


def answer(rollout: Peer, said: bytes) -> None:
    generate = rollout.next(m.Generate)
    rollout.box.ask(m.Generated(id=generate.id, answer=as_bytes(said), oldest=0, newest=0), 5)


def text(array: np.ndarray) -> str:
    return array.tobytes().decode()


def test_a_group_that_was_given_back_keeps_what_was_kept_of_it(gateways: Gateways) -> None:
    first = gateways.open("gateway-0")
    (lease,) = first.leases(1)
    assert lease.number == 0 and not lease.records
    first.box.ask(note("session.0", b"ended"), 5)
    first.held.clear()
    first.box.ask(m.GiveBack(purpose="train", number=0), 5)
    second = gateways.open("gateway-1")
    (lease,) = second.leases(1)
    assert {name: text(data) for name, data in lease.records.items()} == {"session.0": "ended"}
    second.held.clear()
    second.box.ask(m.GiveBack(purpose="train", number=0), 5)
    gateways.restart()
    third = gateways.open("gateway-2")
    (lease,) = third.leases(1)
    assert {name: text(data) for name, data in lease.records.items()} == {"session.0": "ended"}
    assert gateways.stage.trainer.box.ask(m.StatusRequest(), 5).state["totals"]["leased"] == 1


def test_a_group_that_gets_on_outlives_any_number_of_gateways(gateways: Gateways) -> None:
    for life in range(1, 8):
        gateway = gateways.stage.peer("gateway", "gateway-0", str(life))
        gateway.box.tell(m.Credit(total=1))
        (lease,) = gateway.leases(1)
        assert lease.number == 0 and lease.attempt <= 2
        said = asked(gateway, lease, f"turn of life {life}")
        answer(gateways.rollout, b"yes")
        said.result(5)


def test_a_stall_names_the_sessions_whose_agents_have_the_word(tmp_path: Path, redis_url: str) -> None:
    stage = Stage(tmp_path, redis_url, agents=True, broker=BrokerConfig(dead_after_s=20, heartbeat_s=0.2, stall_s=0.5))
    stage.load(stage.rollout(), 0)
    gateway = stage.peer("gateway", "gateway-0")
    gateway.box.tell(m.Credit(total=1))
    (lease,) = gateway.leases(1)
    kept = [{"life": 0, "opened": True, "ended": True}, {"life": 2, "opened": True}, {"life": 1, "opened": False}]
    for place, session in enumerate(kept):
        gateway.box.ask(note(f"session.{place}", wire.pack(session)), 5)
    until(lambda: "train-0-1-2" in (stage.broker.state["stall"] or ""), 10, "it to be noticed")
    said = stage.broker.state["stall"]
    assert "generated by gateway-0#1, where the agent of train-0-1-2 has the word: penstock agents" in said, said
    assert re.search(r"; no step for [1-9]\d* s$|; no step for 0 s$", said), said
    key = m.TurnKey(purpose="train", number=0, place=1, turn=0)
    gateway.box.ask_later(
        m.TurnRequest(key=key, prompt=as_bytes(b"1234"), sampling=lease.sampling, stream=1, note=as_bytes(b"")), 10
    )
    until(lambda: stage.broker.state["stall"].startswith("group 0 is being generated by gateway-0#1; no"), 10, "a turn")
    stage.close()


@pytest.mark.parametrize("pictures", [(), (b"a picture", b"and another" * 2000)])
def test_a_turn_that_waits_may_be_asked_for_again(gateways: Gateways, pictures: tuple[bytes, ...]) -> None:
    gateway = gateways.open("gateway-0")
    (lease,) = gateway.leases(1)
    asked(gateway, lease, "x", b"12345678", pictures)
    again = asked(gateway, lease, "x", b"12345678", pictures)
    generate = gateways.rollout.next(m.Generate)
    assert tuple(picture.tobytes() for picture in generate.pictures) == pictures
    assert (generate.sampled is None) == (not pictures) and generate.prompt.tobytes() == b"12345678"
    gateways.rollout.box.ask(m.Generated(id=generate.id, answer=as_bytes(b"said"), oldest=0, newest=0), 5)
    assert text(again.result(5).answer) == "said"


def test_a_rollout_is_told_of_a_turn_that_nobody_waits_for(gateways: Gateways) -> None:
    gateway = gateways.open("gateway-0")
    (lease,) = gateway.leases(1)
    asked(gateway, lease, "x")
    first = gateways.rollout.next(m.Generate)
    asked(gateway, lease, "y", b"12345678")
    assert gateways.rollout.next(m.Unwanted).ids == [first.id], "it is another question"
    second = gateways.rollout.next(m.Generate)
    gateway.held.clear()
    gateway.box.ask(m.GiveBack(purpose="train", number=0), 5)
    assert gateways.rollout.next(m.Unwanted).ids == [second.id]


def test_what_was_answered_to_one_question_is_no_answer_to_another(gateways: Gateways) -> None:
    first = gateways.open("gateway-0")
    (lease,) = first.leases(1)
    asked(first, lease, "what is 1+1?")
    generate = gateways.rollout.next(m.Generate)
    first.box.tell(m.Bye(reason="killed"))  # while the policy answers
    second = gateways.open("gateway-1")
    (taken_over,) = second.leases(1)
    assert not taken_over.records
    late = m.Generated(id=generate.id, answer=as_bytes(b"2"), oldest=0, newest=0)
    gateways.rollout.box.ask(late, 5)
    other = asked(second, taken_over, "what is 2+2?")
    answer(gateways.rollout, b"4")
    assert text(other.result(5).answer) == "4"
    assert text(asked(second, taken_over, "what is 2+2?").result(5).answer) == "4", "asked again, it is the same"
    second.box.tell(m.Bye(reason="killed"))
    (third,) = gateways.open("gateway-2").leases(1)
    assert {name: text(data) for name, data in third.records.items()} == {
        "note.0.4": "what is 2+2?", "answer.0.4": "4"
    }  # fmt: skip


def test_an_answer_that_nobody_asked_for_is_not_kept_beside_the_next_question(gateways: Gateways) -> None:
    first = gateways.open("gateway-0")
    (lease,) = first.leases(1)
    asked(first, lease, "what is 1+1?")
    generate = gateways.rollout.next(m.Generate)
    first.box.tell(m.Bye(reason="killed"))
    second = gateways.open("gateway-1")
    second.leases(1)
    gateways.rollout.box.ask(m.Generated(id=generate.id, answer=as_bytes(b"2"), oldest=0, newest=0), 5)
    asked(second, lease, "what is 2+2?")
    gateways.rollout.next(m.Generate)
    second.box.tell(m.Bye(reason="killed"))  # before it was answered: who is next must not build on turn 4
    assert not gateways.open("gateway-2").leases(1)[0].records
    gateways.restart()
    assert not gateways.open("gateway-3").leases(1)[0].records


def test_a_session_with_branches_is_one_to_be_compared_with(gateways: Gateways) -> None:
    """The other one of the group has no reward: there is nothing to learn from."""
    gateway, reward = gateways.open("gateway-0"), gateways.stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=10))
    lease = gateway.next(m.Lease)
    tokens, mask, versions = np.array([3, 5], np.int32), np.array([0, 1], np.uint8), np.array([-1, 0], np.int32)
    made = [Trajectory(tokens, mask, np.zeros(2, np.float32), versions, "a", session=at) for at in (0, 0, 1)]
    gateway.box.ask(finished(lease, Group(lease.number, lease.prompt, made)), 5)
    reward.score(1, [1.0, 0.5, np.nan])
    assert "too few trajectories have a reward" in (gateways.folder / "dropped.jsonl").read_text()


def test_a_group_that_a_gateway_does_not_hold_is_refused_by_name(gateways: Gateways) -> None:
    gateway = gateways.open("gateway-0")
    (lease,) = gateway.leases(1)
    gateway.box.ask(m.GiveBack(purpose="train", number=0), 5)
    for message in (note("session.0", b"late"), m.GiveBack(purpose="train", number=0)):
        with pytest.raises(RefusedError, match="train group 0 is not leased to gateway-0#1") as refused:
            gateway.box.ask(message, 5)
        assert refused.value.code == "not_held"
    with pytest.raises(RefusedError) as refused:
        asked(gateway, lease, "what is 1+1?").result(5)
    assert refused.value.code == "not_held"


def test_a_group_is_taken_over_however_much_was_kept_of_it(gateways: Gateways, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAMES", 64)
    first = gateways.open("gateway-0")
    first.leases(1)
    kept = {f"note.0.{turn}": bytes([turn % 256]) * (wire.INLINE_BYTES + turn) for turn in range(wire.MAX_FRAMES + 1)}
    for said in [first.box.ask_later(note(name, data), 20) for name, data in kept.items()]:
        said.result(20)
    first.box.tell(m.Bye(reason="killed"))
    (lease,) = gateways.open("gateway-1").leases(1)
    assert {name: data.tobytes() for name, data in lease.records.items()} == kept


def test_sessions_that_no_message_has_room_for_cost_their_group_alone(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = gateways.open("gateway-0")
    first.leases(1)
    first.box.ask(note("session.0", bytes(wire.INLINE_BYTES)), 5)
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", wire.INLINE_BYTES)
    first.box.tell(m.Bye(reason="killed"))
    (lease,) = gateways.open("gateway-1").leases(1)
    assert lease.number == 1
    assert "its lease cannot be sent: Lease: a frame exceeds" in (gateways.folder / "dropped.jsonl").read_text()


def test_a_turn_that_may_kill_its_rollouts_is_given_alone(gateways: Gateways) -> None:
    gateway = gateways.open("gateway-0", room=3)
    leases = gateway.leases(3)
    said = [asked(gateway, lease, f"{lease.number}") for lease in leases[:2]]
    first = {gateways.rollout.next(m.Generate).id for _ in range(2)}
    second = gateways.stage.rollout(incarnation="2")
    assert {second.next(m.Generate).id for _ in range(2)} == first
    third = gateways.stage.rollout(incarnation="3", credit=8)
    suspect = third.next(m.Generate)
    other = asked(gateway, leases[2], "another")
    time.sleep(0.2)
    assert third.box.inbox.empty(), "it holds a suspect"
    beside = gateways.stage.rollout("rollout-1", credit=8)
    assert {beside.next(m.Generate).id} == first - {suspect.id}
    time.sleep(0.2)
    assert beside.box.inbox.empty()
    third.box.ask(m.Generated(id=suspect.id, answer=as_bytes(b"2"), oldest=0, newest=0), 5)
    answer(third, b"4")
    assert text(other.result(5).answer) == "4" and sum(each.done() for each in said) == 1


def test_a_suspected_turn_waits_for_an_idle_rollout_which_is_given_nothing_more(gateways: Gateways) -> None:
    gateway = gateways.open("gateway-0", room=3)
    leases = gateway.leases(3)
    asked(gateway, leases[0], "the suspect")
    suspect = gateways.rollout.next(m.Generate)
    second = gateways.stage.rollout(incarnation="2")
    second.next(m.Generate)
    busy = gateways.stage.rollout("rollout-1")
    asked(gateway, leases[1], "one before")
    before = busy.next(m.Generate)
    gateways.stage.rollout(incarnation="3", credit=0)  # the second was killed, too
    time.sleep(0.2)
    asked(gateway, leases[2], "one after")
    time.sleep(0.3)
    assert before.id != suspect.id and busy.box.inbox.empty(), "it is to be idle"
    busy.box.ask(m.Generated(id=before.id, answer=as_bytes(b"2"), oldest=0, newest=0), 5)
    assert busy.next(m.Generate).id == suspect.id
    time.sleep(0.2)
    assert busy.box.inbox.empty(), "it holds a suspect"


def test_of_several_suspected_turns_one_waits_for_a_busy_rollout_and_other_turns_go_on(gateways: Gateways) -> None:
    gateway = gateways.open("gateway-0", room=3)
    first, other, last = gateway.leases(3)
    asked(gateway, first, "a suspect")
    asked(gateway, other, "another")
    suspects = {gateways.rollout.next(m.Generate).id for _ in range(2)}
    second = gateways.stage.rollout(incarnation="2", credit=2)
    assert {second.next(m.Generate).id for _ in range(2)} == suspects
    busy = [gateways.stage.rollout(name, credit=1) for name in ("rollout-2", "rollout-1")]
    for place, rollout in enumerate(busy):
        asked(gateway, last, "one before", place=place)
        assert rollout.next(m.Generate).id not in suspects
    gateways.stage.rollout(incarnation="3", credit=0)  # the second was killed, too
    for credit, rollout in zip((9, 3), busy, strict=True):
        rollout.box.tell(m.Credit(total=credit))
        rollout.box.ask(m.StatusRequest(), 5)
    for place in range(2, 4):
        asked(gateway, last, "one after", place=place)
        assert busy[1].next(m.Generate).id not in suspects
    assert busy[0].box.inbox.empty(), "it is to be idle"


def test_thousands_of_waiting_turns_are_not_compared_with_each_rollout() -> None:
    turns, looks = Turns(), []
    for place in range(1000):
        turns.ask(("train", 0), place, ("train", 0, place), None, ("gateway-0#1", place))

    class Looked(Member):
        @property
        def room(self) -> int:
            looks.append(self.name)
            return 1

    rollouts = [Looked(f"rollout-{at}#1", f"rollout-{at}", "rollout", "here", 1, 0.0) for at in range(8)]
    state: Any = SimpleNamespace(
        turns=turns, settings=SimpleNamespace(broker=BrokerConfig()),
        groups=SimpleNamespace(gate=SimpleNamespace(required_version=lambda number: 3)),
    )  # fmt: skip
    AgentDesk(state, cast(Any, None))._grant_turns(list(rollouts), 0.0)
    assert len(looks) <= len(rollouts)


def test_a_suspected_turn_that_nobody_serves_holds_up_no_other() -> None:
    turns, given = Turns(), []
    for place, group in enumerate((("train", 9), ("train", 0))):  # of which the first wants a version to come
        turn = turns.ask(group, place, (*group, place), None, ("gateway-0#1", place))
        turn.attempt = SUSPECT_AFTER
    rollout = Member("rollout-0#1", "rollout-0", "rollout", "here", 1, 0.0)
    rollout.version, rollout.credit = 2, 4
    state: Any = SimpleNamespace(
        turns=turns, settings=SimpleNamespace(broker=BrokerConfig()),
        groups=SimpleNamespace(gate=SimpleNamespace(required_version=lambda number: 3 if number == 9 else 2)),
    )  # fmt: skip
    desk = AgentDesk(state, cast(Any, None))
    desk._grant_turn = lambda turn, to, now: given.append(turn.group)  # type: ignore[method-assign]
    desk._grant_turns([rollout], 0.0)
    assert given == [("train", 0)]


class Machine(RuleBasedStateMachine):
    """Whoever is leased a group that was ever leased is known to be so: what is kept of it is read, and not begun anew;
    and a grant that was given back, or during which the broker ended, does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = Memory()
        self.leases = Leases(self.journal)
        self.granted: set[int] = set()
        self.counted: dict[int, int] = {}
        self.outlived: set[int] = set()
        """Held since before the last broker."""

    @rule()
    def grant(self) -> None:
        lease = self.leases.waiting() or self.leases.new()
        assert lease.granted == (lease.number in self.granted)
        self.leases.grant(lease, "gateway-0#1", 0.0)
        self.granted.add(lease.number)
        self.counted[lease.number] = self.counted.get(lease.number, 0) + 1
        self.outlived.discard(lease.number)

    @rule(which=st.integers(0, 30), given_back=st.booleans())
    def stop(self, which: int, given_back: bool) -> None:
        held = sorted(self.leases.holds.held)
        if not held:
            return
        number = held[which % len(held)]
        if given_back:
            self.leases.give_back(number)
            self.counted[number] -= number not in self.outlived
        else:
            self.leases.holds.free(number)
        self.outlived.discard(number)

    @rule(which=st.integers(0, 30))
    def finish(self, which: int) -> None:
        if self.leases.open:
            self.leases.close(sorted(self.leases.open)[which % len(self.leases.open)])

    @rule()
    def restart_broker(self) -> None:
        self.journal.commit()
        for number in self.leases.holds.held.keys() - self.outlived:
            self.counted[number] -= 1
        self.outlived |= self.leases.holds.held.keys()
        self.leases = Leases(self.journal)

    @invariant()
    def grants_are_counted(self) -> None:
        for number, lease in self.leases.open.items():
            assert lease.granted == (number in self.granted) and lease.attempt == self.counted.get(number, 0)


TestLeases = Machine.TestCase
TestLeases.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("purpose", ["train", "eval"])
def test_a_rollout_is_told_which_turns_are_an_evaluations(purpose: Any) -> None:
    """Nobody computes with their log-probabilities, so that they may be drawn at another temperature."""
    request = m.TurnRequest(
        key=m.TurnKey(purpose=purpose, number=0, place=0, turn=0), prompt=as_bytes(b"1234"),
        sampling=Sampling(n=1, max_new_tokens=4), stream=1, note=as_bytes(b""),
    )  # fmt: skip
    assert _Wanted.of(request).generate(7, 0).unread == (purpose == "eval")
