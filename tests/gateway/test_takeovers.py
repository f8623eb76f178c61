"""What a gateway that takes a group over knows of it, and who is told what while sessions end."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.protocols import wire
from penstock.protocols.experience import Group, as_bytes
from penstock.protocols.mailbox import DeadlineError
from penstock.services.gateway.access import WHO, Visitor
from penstock.services.gateway.conversation import Conversation
from penstock.services.gateway.errors import AgentError
from penstock.services.gateway.questions import ONCE
from penstock.services.gateway.session import Session, Turn
from penstock.services.gateway.work import Held
from tests.gateway.house import House

SAY = [{"role": "user", "content": "sort ba="}]


@pytest.fixture
def house(tokenizers: dict[bool, Path], model: Any) -> House:
    return House(tokenizers[False], model)


def group(house: House, number: int = 0) -> Group:
    made = house.delivered["train", number]
    assert isinstance(made, Group), made
    return made


async def goes_on(house: House, held: Held, form: str, last: Turn | None) -> Turn:
    """The next turn of an agent that speaks in messages, in text or in tokens."""
    if form == "chat":
        user = {"role": "user", "content": "b", "name": "x" * 2000}
        return await house.desk.chat(held, Conversation([*(last.said if last else ()), user]))
    if form == "text":
        return await house.desk.completes(held, (last.text if last else "") + "ba")(ONCE)
    return await house.desk.generate(held, np.append(held.session.tokens(last), [5, 6]).astype(np.int32))


@pytest.mark.parametrize("form", ["chat", "text", "tokens"])
def test_a_turn_keeps_what_it_adds_and_is_whole_after_a_takeover(house: House, form: str) -> None:
    async def play() -> list[Turn]:
        house.desk.start(house.lease(0))
        held = await house.desk.open(1)
        turns = [await goes_on(house, held, form, None)]
        for _ in range(7):
            turns.append(await goes_on(house, held, form, turns[-1]))
        for parent, turn in pairwise(turns):
            assert turn.parent == parent.number
            assert all(mine is its for mine, its in zip(turn.said, parent.said, strict=False)), "kept in memory once"
        house.open().start(house.lease(0))
        held = await house.desk.find(held.id)
        kept = list(held.session.turns.values())
        assert [(t.said, t.text, t.message) for t in kept] == [(t.said, t.text, t.message) for t in turns]
        assert (await goes_on(house, held, form, kept[-1])).parent == turns[-1].number
        return turns

    turns = house.run(play)
    sizes = [house.records["train", 0][f"note.0.{turn.number}"].size for turn in turns]
    assert max(sizes) < sizes[0] + 50, sizes


@pytest.mark.parametrize("form", ["chat", "text"])
def test_a_session_is_taken_over_from_a_gateway_of_older_code(house: House, form: str) -> None:
    """It had all of a conversation kept with each turn."""

    async def play() -> None:
        house.desk.start(house.lease(0))
        held = await house.desk.open(1)
        first = await goes_on(house, held, form, None)
        turns = [first, await goes_on(house, held, form, first)]
        records = house.records["train", 0]
        for turn in turns:
            note = wire.unpack(records[f"note.0.{turn.number}"].tobytes())
            del note["added"]
            whole = turn.text[: len(turn.text) - len(turn.message["content"])]
            said = turn.said[:-1] if form == "chat" else [{"text": whole}]
            records[f"note.0.{turn.number}"] = as_bytes(wire.pack({**note, "said": json.dumps(said)}))
        house.open().start(house.lease(0))
        held = await house.desk.find(held.id)
        kept = held.session.turns
        assert [(t.text, t.message, t.parent) for t in kept.values()] == [(t.text, t.message, t.parent) for t in turns]
        turns.append(await goes_on(house, held, form, kept[turns[-1].number]))
        house.open().start(house.lease(0))
        held = await house.desk.find(held.id)
        again = held.session.turns[turns[-1].number]
        assert (again.said, again.text, again.parent) == (turns[-1].said, turns[-1].text, turns[-2].number)

    house.run(play)


def late(house: House) -> asyncio.Event:
    """From now on the policy answers only when the event is set."""
    event, step = asyncio.Event(), house.engine.step
    house.engine.step = lambda: step() if event.is_set() else []  # type: ignore[method-assign]
    return event


def test_a_turn_that_a_rollout_was_at_when_its_session_ended_is_no_branch_after_a_takeover(house: House) -> None:
    async def play() -> None:
        house.desk.start(house.lease(0, n=2))
        held = await house.desk.open(1)
        await house.desk.chat(held, Conversation(SAY))
        slow = late(house)
        asking = asyncio.ensure_future(house.desk.chat(held, Conversation([{"role": "user", "content": "sort ab="}])))
        await asyncio.sleep(0.05)
        await house.desk.finish(held.id, 1.0)
        with pytest.raises(AgentError):
            await asking
        slow.set()
        while len(house.engines_own) < 2:
            await asyncio.sleep(0.01)
        other = house.open()
        other.start(house.lease(0, n=2))
        await other.finish((await other.open(1)).id, 0.0)

    house.run(play)
    assert "answer.0.1" in house.records["train", 0], "the rollout has completed it"
    first, second = group(house).trajectories
    assert first.sampled == len(house.engines_own[0].tokens) and "no turn" in second.failure


def test_a_session_that_was_finished_is_finished_also_at_the_gateway_that_takes_over(house: House) -> None:
    alice, bob = Visitor("alice"), Visitor("bob")

    async def play() -> None:
        WHO.set(alice)
        house.desk.start(house.lease(0, n=2))
        held = await house.desk.open(1)
        await house.desk.finish(held.id, 1.0)
        other = house.open()
        waiting = asyncio.ensure_future(other.finish(held.id, 1.0))
        await asyncio.sleep(0.1)
        other.start(house.lease(0, n=2))
        await asyncio.wait_for(waiting, 5)
        await other.finish(held.id, 1.0)
        WHO.set(bob)
        with pytest.raises(AgentError, match="there is no session"):
            await other.finish(held.id, 1.0)

    house.run(play)


def test_who_waits_for_an_answer_is_told_that_the_session_has_ended(house: House) -> None:
    async def play() -> AgentError:
        house.desk.start(house.lease(0))
        held = await house.desk.open(1)
        late(house)
        asking = asyncio.ensure_future(house.desk.chat(held, Conversation(SAY)))
        await asyncio.sleep(0.05)
        await house.desk.finish(held.id, 1.0)
        with pytest.raises(AgentError) as told:
            await asyncio.wait_for(asking, 5)
        return told.value

    told = house.run(play)
    assert (told.status, told.code, str(told)) == (410, "session_lost", "the session has ended")


class Away:
    """A broker that answers `Note`s when it is back, in the order in which they were said."""

    def __init__(self, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ask, self._waiting = house.desk._records._ask, list[tuple[Any, Future[Any]]]()
        monkeypatch.setattr(house.desk._records, "_ask", self._say)

    def _say(self, message: Any, deadline_s: float) -> Future[Any]:
        self._waiting.append((message, Future()))
        return self._waiting[-1][1]

    def back(self, error: Exception | None = None) -> None:
        """It answers all that waits, with this ``error`` where there is one."""
        while self._waiting:
            message, future = self._waiting.pop(0)
            if error:
                future.set_exception(error)
            else:
                future.set_result(self._ask(message, 1).result())


@pytest.mark.parametrize("other", ["abandon", "expire", "finish"])
def test_a_session_that_is_being_finished_stays_finished(
    house: House, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    async def play() -> None:
        house.desk.start(house.lease(0))
        held = await house.desk.open(1, beats=True)
        await house.desk.chat(held, Conversation(SAY))
        away = Away(house, monkeypatch)
        finishing = [asyncio.ensure_future(house.desk.finish(held.id, 0.5))]
        await asyncio.sleep(0.05)
        if other == "abandon":
            finishing.append(asyncio.ensure_future(house.desk.abandon(held, "no answer")))
        elif other == "finish":
            finishing.append(asyncio.ensure_future(house.desk.finish(held.id, 0.25)))
        else:
            held.heard = float("-inf")
            house.desk.expire()
        await asyncio.sleep(0.05)
        away.back()
        await asyncio.wait_for(asyncio.gather(*finishing), 5)

    house.run(play)
    (made,) = group(house).trajectories
    assert made.sampled == len(house.engines_own[0].tokens) and float(made.rewards.sum()) == 0.5
    kept = wire.unpack(house.records["train", 0]["session.0"].tobytes())
    assert kept["ended"] and kept["reward"] == 0.5


def test_a_session_that_could_not_be_finished_is_its_agents_for_as_long_as_before(
    tokenizers: dict[bool, Path], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(tokenizers[False], model, idle_s=0.3)

    async def play() -> None:
        house.desk.start(house.lease(0))
        held = await house.desk.open(1)
        await house.desk.chat(held, Conversation(SAY))
        with monkeypatch.context() as patched:
            away = Away(house, patched)
            finishing = asyncio.ensure_future(house.desk.finish(held.id, 1.0))
            await asyncio.sleep(0.4)
            away.back(DeadlineError("no answer"))
            with pytest.raises(AgentError, match="the broker does not answer"):
                await finishing
            house.desk.expire()
        await house.desk.finish(held.id, 1.0)

    house.run(play)
    assert float(group(house).trajectories[0].rewards.sum()) == 1.0


def test_a_session_that_its_agent_did_not_take_is_free_at_the_next_gateway(house: House) -> None:
    async def play() -> None:
        house.desk.start(house.lease(0))
        held = await house.desk.open(1)
        await house.desk.untaken(held)
        other = house.open()
        other.start(house.lease(0))
        assert not other.rows() and (await other.open(1)).id == held.id, "no life was lost"

    house.run(play)


def test_a_session_is_free_also_where_the_broker_cannot_be_told(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        house.desk.start(house.lease(0))
        held = await house.desk.open(1)

        async def away(*_: Any) -> None:
            raise AgentError(503, "broker_away", "the broker does not answer; ask again", 5.0)

        with monkeypatch.context() as patched:
            patched.setattr(house.desk._records, "keep", away)
            with pytest.raises(AgentError):
                await house.desk.abandon(held, "given up")
        assert (await house.desk.open(1)).id == "train-0-0-1"

    house.run(play)


def test_a_client_that_says_that_it_is_alive_may_take_its_time(tokenizers: dict[bool, Path], model: Any) -> None:
    house = House(tokenizers[False], model, idle_s=0.01, lost_s=60.0)

    async def play() -> None:
        house.desk.start(house.lease(0, n=2))
        alive, silent = await house.desk.open(1, beats=True), await house.desk.open(1)
        await asyncio.sleep(0.05)
        house.desk.expire()
        await asyncio.sleep(0.05)
        assert [row["session"] for row in house.desk.rows()] == [alive.id], silent.id
        assert alive.heard is not None
        alive.heard -= 61
        house.desk.expire()
        await asyncio.sleep(0.05)
        assert not house.desk.rows()

    house.run(play)


def test_a_session_that_no_agent_has_heard_of_costs_no_attempt(tokenizers: dict[bool, Path], model: Any) -> None:
    house = House(tokenizers[False], model, attempts=2)

    async def lost(held: Held) -> None:
        held.heard = float("-inf")
        house.desk.expire()
        await asyncio.sleep(0.05)
        assert not house.desk.rows()

    async def play() -> list[str]:
        house.desk.start(house.lease(0))
        names = []
        for taken in (False, False, True, False, True):
            held = await house.desk.open(1, beats=True)
            names.append(held.id)
            if taken:
                house.desk.heard([held.id])
            await lost(held)
            if not house.delivered:
                house.open().start(house.lease(0))
        return names

    assert house.run(play) == [f"train-0-0-{life}" for life in range(5)], "what one agent may speak of no other has"
    assert "given out 2 times" in group(house).trajectories[0].failure


def test_gauges_may_be_read_while_sessions_come_and_go(house: House) -> None:
    async def play() -> None:
        house.desk.start(house.lease(0))
        work = next(iter(house.desk._works.values()))
        held, until = house.desk._held, time.monotonic() + 20
        with ThreadPoolExecutor(1) as mailbox:
            reading = mailbox.submit(lambda: [house.desk.gauges() for _ in range(2000)])
            while not reading.done() and time.monotonic() < until:
                for number in range(200):
                    held[f"s-{number}"] = Held(f"s-{number}", work, Session(0), 0)
                await asyncio.sleep(0)
                held.clear()
            assert len(reading.result(0)) == 2000

    house.run(play)
