"""Answers that are late, or lost on the way: who asks again joins the turn under way."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from penstock.protocols import messages as m
from penstock.protocols.agent_client import AgentClient, AgentRefusedError, AsyncAgentClient
from penstock.protocols.experience import as_bytes
from penstock.protocols.mailbox import DeadlineError, RefusedError
from penstock.services.broker.agents import AgentDesk
from penstock.services.broker.rules.turns import Turns
from penstock.services.gateway.access import WHO, NamedKey, Visitor
from penstock.services.gateway.conversation import Conversation
from penstock.services.gateway.errors import AgentError
from penstock.services.gateway.questions import Asking, Question, Questions
from penstock.services.gateway.zmq_door import ZmqDoor
from tests.gateway.house import House
from tests.gateway.test_doors import NO_KEYS, SAY, group, opened, served
from tests.gateway.test_requests import by_zeromq
from tests.gateway.test_takeovers import late


@pytest.fixture
def house(tokenizers: dict[bool, Path], model: Any) -> House:
    made = House(tokenizers[True], model, tool_calls="none", turn_s=0.3)
    made.desk.start(made.lease(0))
    return made


def test_who_asks_again_over_http_joins_the_turn_that_was_late(house: House) -> None:
    async def agent(url: str) -> None:
        slow = late(house)
        async with httpx.AsyncClient(timeout=60) as http:
            path = f"{(await opened(url, http))['base_url']}/chat/completions"
            told = await http.post(path, json={"messages": SAY})
            assert told.status_code == 504 and told.json()["error"]["code"] == "turn_late"
            assert float(told.headers["retry-after"]) > 0 and "gateway.turn_s=0.3" in house.desk.rows()[0]["error"]
            slow.set()
            again = await http.post(path, json={"messages": SAY}, headers={"x-stainless-retry-count": "1"})
            assert again.status_code == 200 and again.json()["penstock"]["turns"] == [0]

    served(house, agent)
    assert len(house.asked) == 1


@pytest.mark.parametrize("path", ["chat/completions", "responses", "generate"])
@pytest.mark.parametrize("joined", [False, True])
def test_an_answer_that_comes_when_its_agent_has_just_gone_is_not_had(
    tokenizers: dict[bool, Path], model: Any, path: str, joined: bool
) -> None:
    """Though nobody has looked yet whether it is there. Who asks again has it."""
    house = House(tokenizers[True], model, tool_calls="none")
    house.desk.start(house.lease(0))
    asks: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": SAY}, "responses": {"input": "ab"}, "generate": {"tokens": [5, 6]},
    }  # fmt: skip

    async def agent(url: str) -> list[int]:
        slow = late(house)
        async with httpx.AsyncClient(timeout=60) as http:
            session = await opened(url, http)

            async def ask(again: bool = False) -> httpx.Response:
                said = asks[path] | ({"again": again} if path == "generate" else {})
                headers = {"x-stainless-retry-count": str(int(again))}
                return await http.post(f"{session['base_url']}/{path}", json=said, headers=headers)

            asking = asyncio.ensure_future(ask())
            await asyncio.sleep(0.6)  # a look is behind it, and the next one is half a second away
            asking.cancel()
            await asyncio.sleep(0.1)
            slow.set()
            await asyncio.sleep(1.0)
            (turn,) = house.desk._held[session["session"]].session.turns.values()
            assert not turn.wanted
            if joined:
                assert (await ask(again=True)).status_code == 200 and turn.wanted
            await http.post(f"{url}/v1/sessions/{session['session']}/finish", json={"reward": 1.0})
        return [int(trajectory.sampled > 0) for trajectory in group(house).trajectories]

    assert served(house, agent) == [joined]
    assert len(house.asked) == 1


def test_openais_client_and_ours_ask_again_by_themselves(house: House) -> None:
    async def by_openai(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            base = (await opened(url, http))["base_url"]
        slow = late(house)
        asyncio.get_running_loop().call_later(0.6, slow.set)
        async with openai.AsyncOpenAI(base_url=base, api_key="none") as client:
            told = await client.chat.completions.create(model="p", messages=SAY)  # type: ignore[arg-type]
            assert told.model_extra["penstock"]["turns"] == [0]  # type: ignore[index]

    served(house, by_openai)
    assert len(house.asked) == 1

    async def by_us(client: AsyncAgentClient) -> None:
        async with await client.session() as session:
            slow = late(house)
            asyncio.get_running_loop().call_later(0.6, slow.set)
            assert (await session.chat(SAY)).turn == 0
            await session.finish(1.0)

    house.open().start(house.lease(1))
    by_zeromq(house, by_us)
    assert len(house.asked) == 2


def test_who_was_refused_and_asks_again_gets_an_answer_of_its_own(tokenizers: dict[bool, Path], model: Any) -> None:
    """In a loop that asks the same several times."""
    house = House(tokenizers[True], model, tool_calls="none", waiting=1)
    house.desk.start(house.lease(0))

    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            base = (await opened(url, http))["base_url"]

        async def turn(text: str) -> int:
            told = await client.chat.completions.create(model="p", messages=[{"role": "user", "content": text}])
            return told.model_extra["penstock"]["turns"][0]  # type: ignore[index]

        async with openai.AsyncOpenAI(base_url=base, api_key="none") as client:
            assert [await turn("ab"), await turn("ab")] == [0, 1]
            slow = late(house)
            other = asyncio.ensure_future(turn("b"))
            await asyncio.sleep(0.2)
            refused = asyncio.ensure_future(turn("ab"))
            await asyncio.sleep(0.3)
            assert "gateway.waiting=1" in house.desk.rows()[0]["error"]
            slow.set()
            assert [await other, await refused] == [2, 3]
            await house.desk.finish("train-0-0-0", 1.0)

    served(house, agent)
    assert len(house.asked) == 4


@pytest.mark.parametrize("lost", ["quota", "no_answer", "broker_away"])
def test_what_was_refused_is_asked_anew_and_once(house: House, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    alice = Visitor("alice", NamedKey(sha256="0" * 64, turns_per_minute=1 if lost == "quota" else 9))

    def say(message: Any, deadline_s: float) -> Future[m.Message]:
        told: Future[m.Message] = Future()
        if lost == "no_answer":
            told.set_result(m.TurnAnswer(answer=as_bytes(b""), error=m.UNANSWERED))
        else:
            told.set_exception(RefusedError(m.Refused(code="failed", reason="no")))
        return told

    async def play() -> list[int]:
        WHO.set(alice)
        held = await house.desk.open(1)
        found = [(await house.desk.chat(held, Conversation(SAY))).number]
        with monkeypatch.context() as patched:
            patched.setattr(house.desk._policy, "_say", say)
            with pytest.raises(AgentError) as told:
                await house.desk.chat(held, Conversation(SAY))
        assert told.value.code == lost and told.value.retry_s
        alice._asked.clear()
        for _ in range(2):
            found.append((await house.desk.chat(held, Conversation(SAY), asked=Asking(again=True))).number)
        return found

    first, second, third = house.run(play)
    assert first < second == third and len(house.asked) == 2


def test_a_refusal_that_nobody_came_back_to_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute later whoever asks again means an answer that has got lost."""
    questions, heard = Questions(), Question(heard=True)
    questions._asked["said"] = [heard]
    for age_s, wanted in ((10.0, None), (70.0, heard)):
        monkeypatch.setattr(time, "monotonic", lambda: 100.0)
        questions.refuse("said")
        monkeypatch.setattr(time, "monotonic", lambda age_s=age_s: 100.0 + age_s)
        assert questions.again("said") is wanted and questions.again("said") is heard


@pytest.mark.parametrize("ended", ["gone", "refused"])
def test_of_several_answers_none_is_trained_on_before_their_agent_has_had_all(
    tokenizers: dict[bool, Path], model: Any, ended: str
) -> None:
    house = House(tokenizers[True], model, tool_calls="none")
    house.desk.start(house.lease(0))

    async def agent(url: str) -> None:
        said, loop = house.desk._policy._say, asyncio.get_running_loop()
        answers: list[Future[Any]] = []
        never: Future[Any] = Future()

        def refuse() -> None:
            if not never.done():
                never.set_result(m.TurnAnswer(answer=as_bytes(b""), error=m.UNANSWERED))

        def answered(answer: Future[Any]) -> None:
            if ended == "refused" and all(each.done() for each in answers):
                loop.call_soon_threadsafe(loop.call_later, 0.2, refuse)

        def all_but_one(message: Any, deadline_s: float) -> Future[Any]:
            if len(answers) == 3:
                for each in answers:
                    each.add_done_callback(answered)
                return never
            answers.append(said(message, deadline_s))
            return answers[-1]

        async with httpx.AsyncClient(timeout=60) as http:
            session = await opened(url, http)
            path, several = f"{session['base_url']}/chat/completions", {"messages": SAY, "n": 4}
            house.desk._policy._say = all_but_one
            try:
                told = await http.post(path, json=several, timeout=1.5 if ended == "gone" else 30)
                assert told.status_code == 503
            except httpx.ReadTimeout:
                assert ended == "gone"
            house.desk._policy._say = said
            deadline = time.monotonic() + 20
            while len(house.engines_own) < 3 and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            assert len(house.engines_own) == 3
            if ended == "refused":
                again = await http.post(path, json=several, headers={"x-stainless-retry-count": "1"})
                assert again.json()["penstock"]["turns"] == [0, 1, 2, 4]
            await http.post(f"{url}/v1/sessions/{session['session']}/finish", json={"reward": 1.0})

    served(house, agent)
    assert sum(t.sampled > 0 for t in group(house).trajectories) == (4 if ended == "refused" else 0)


def test_the_plain_client_asks_again_too_until_its_time_is_up(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.protocols.agent_client.TURN_S", 2.0)
    monkeypatch.setattr("penstock.protocols.agent_client.GRACE_S", 0.5)

    def play(address: str) -> int:
        with AgentClient(address) as client, client.session() as session:
            return session.chat(SAY).turn

    async def main() -> None:
        door = ZmqDoor("tcp://127.0.0.1:*", house.desk, None, NO_KEYS)
        door.start(asyncio.get_running_loop(), "http://here")
        try:
            slow = late(house)
            with pytest.raises(AgentRefusedError, match="no answer within"):
                await asyncio.to_thread(play, door.address)
            asyncio.get_running_loop().call_later(0.6, slow.set)
            assert await asyncio.to_thread(play, door.address) == 1, "in the session that was given back"
        finally:
            await asyncio.to_thread(door.close)

    house.run(main)


@pytest.mark.parametrize("turn_s", [0.3, 1.2])
def test_an_agent_waits_as_long_as_the_gateway_lets_a_turn_take_and_hears_what_it_says(
    tokenizers: dict[bool, Path], model: Any, monkeypatch: pytest.MonkeyPatch, turn_s: float
) -> None:
    """Also where its time is up while it asks again."""
    monkeypatch.setattr("penstock.protocols.agent_client.TURN_S", 0.5)
    monkeypatch.setattr("penstock.protocols.agent_client.GRACE_S", 1.5)
    monkeypatch.setattr("penstock.services.gateway.questions.LATE_S", 0.1)
    house = House(tokenizers[True], model, tool_calls="none", turn_s=turn_s)
    house.desk.start(house.lease(0))

    def plain(address: str) -> None:
        with AgentClient(address) as client, client.session() as session:
            session.chat(SAY)

    async def agent(client: AsyncAgentClient) -> None:
        for asked in (late_for(client), asyncio.to_thread(plain, client._line._mailbox.address)):
            began = time.monotonic()
            with pytest.raises(AgentRefusedError, match=f"no answer within gateway.turn_s={turn_s:g} s"):
                await asked
            assert turn_s + 0.2 < time.monotonic() - began < turn_s + 4

    async def late_for(client: AsyncAgentClient) -> None:
        async with await client.session() as session:
            await session.chat(SAY)

    late(house)
    by_zeromq(house, agent)
    assert len(house.asked) == 2


def test_the_broker_is_asked_for_the_same_turn_again(house: House) -> None:
    keys = []

    def say(message: Any, deadline_s: float) -> Future[m.Message]:
        keys.append(message.key)
        if len(keys) < 3:
            lost: Future[m.Message] = Future()
            lost.set_exception(DeadlineError("no answer from the broker"))
            return lost
        return house.say(message, deadline_s)

    async def play() -> None:
        held = await house.desk.open(1)
        house.desk._policy._say = say
        assert (await house.desk.chat(held, Conversation(SAY))).number == 0

    house.run(play)
    assert len(keys) == 3 and len(set(keys)) == 1


def test_a_turn_that_no_rollout_has_answered_may_be_asked_for_again(house: House) -> None:
    """In the broker's own words."""
    sent: list[m.TurnAnswer] = []
    turns = Turns()
    state: Any = SimpleNamespace(
        turns=turns,
        settings=SimpleNamespace(broker=SimpleNamespace(max_attempts=0)),
        members={"gateway-0#1": True},
        router=SimpleNamespace(send=lambda identity, message, request: sent.append(message)),
    )
    turns.ask(("train", 0), "key", "session", None, ("gateway-0#1", 1))
    AgentDesk(state, None)._grant_turns([], 0.0)  # type: ignore[arg-type]
    said = iter([sent[0], m.TurnAnswer(answer=as_bytes(b""), error="the engine has no such token")])

    def say(message: Any, deadline_s: float) -> Future[m.Message]:
        answered: Future[m.Message] = Future()
        answered.set_result(next(said))
        return answered

    async def play() -> list[AgentError]:
        held = await house.desk.open(1)
        house.desk._policy._say = say
        found = []
        for _ in range(2):
            with pytest.raises(AgentError) as told:
                await house.desk.chat(held, Conversation(SAY))
            found.append(told.value)
        return found

    lost, never = house.run(play)
    assert (lost.status, lost.code, bool(lost.retry_s)) == (503, "no_answer", True)
    assert (never.status, never.code, never.retry_s) == (400, "cannot_answer", None)


def test_an_answer_that_has_no_bytes_costs_its_agent_alone(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    message = house.desk.replies.message
    spoiled = {"role": "assistant", "content": "\ud800"}

    async def agent(client: AsyncAgentClient) -> None:
        async with await client.session() as session:
            with monkeypatch.context() as patched:
                patched.setattr(house.desk.replies, "message", lambda *about: (spoiled, message(*about)[1]))
                with pytest.raises(AgentRefusedError, match="the answer cannot be sent: WireError"):
                    await session.chat(SAY)
            assert (await session.chat([{"role": "user", "content": "b"}])).text
            await session.finish(1.0)

    by_zeromq(house, agent)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_door_whose_thread_has_ended_says_so(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        door = ZmqDoor("tcp://127.0.0.1:*", house.desk, None, NO_KEYS)
        door.start(asyncio.get_running_loop(), "http://here")
        assert door.alive
        monkeypatch.setattr(door._router, "flush", lambda: 1 / 0)
        await asyncio.sleep(0.2)
        assert not door.alive

    house.run(play)
