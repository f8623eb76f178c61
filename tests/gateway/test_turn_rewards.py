"""What single turns were worth: where it lies in what is trained on, who may say it, and that it is never lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import CapturingLogger

from penstock.protocols import wire
from penstock.protocols.agent_client import AgentRefusedError, AsyncAgentClient
from penstock.protocols.experience import Group, Trajectory, mean_by_session, sessions_of
from penstock.protocols.mailbox import DeadlineError
from penstock.services.gateway import measured
from penstock.services.gateway.access import WHO, Visitor
from penstock.services.gateway.conversation import Conversation
from penstock.services.gateway.errors import AgentError
from penstock.services.gateway.questions import ONCE
from penstock.services.gateway.session import Session, Turn
from tests.gateway.house import House
from tests.gateway.test_doors import SAY, group, opened, served
from tests.gateway.test_requests import by_zeromq
from tests.gateway.test_sessions import grown
from tests.gateway.test_takeovers import Away
from tests.rollout.test_multi_turn import COUNTING, Table


@pytest.fixture
def house(tokenizers: dict[bool, Path], model: Any) -> House:
    made = House(tokenizers[True], model, tool_calls="none")
    made.desk.start(made.lease(0))
    return made


def lying(trajectory: Trajectory) -> dict[int, float]:
    """Rewards, by the turn of the trajectory on whose last token they lie."""
    ends = np.flatnonzero(np.diff([*trajectory.loss_mask, 0]) == -1)
    found = {
        ends.tolist().index(place): float(trajectory.rewards[place]) for place in np.flatnonzero(trajectory.rewards)
    }
    assert float(trajectory.rewards[trajectory.loss_mask == 0].sum()) == 0
    return found


def ending(house: House, number: int = 0) -> Any:
    """What is kept of the end of a group's first session."""
    return wire.unpack(house.records["train", number]["session.0"].tobytes())


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 25), st.integers(-8, 8), st.booleans(), st.booleans(),
    st.lists(st.none() | st.integers(-8, 8), min_size=25, max_size=25),
)  # fmt: skip
def test_a_session_is_worth_its_turns_and_its_end_however_it_branches(
    seed: int, turns: int, end: int, cut: bool, own: bool, worth: list[int | None]
) -> None:
    rng, session = random.Random(seed), Session(3)
    for _ in range(turns):
        grown(session, rng.choice([None, *session.turns.values()]), rng, "ab")
    said = {turn.number: value / 4 for turn in session.turns.values() if turn.wanted and (value := worth[turn.number])}
    by_name = {str(number): value for number, value in said.items()}
    how = {"truncated": cut, "branches": "own" if own else "shared"}
    session.end({"reward": end / 4, "failure": "", "turn_rewards": by_name} | how)
    leaves, total = session._leaves(), end / 4 + sum(said.values())
    made = session.trajectories(lambda tokens: "", np.zeros(1, np.int32), greedy=False)
    if not leaves:
        assert [t.rewards.sum() for t in made] == [0] and made[0].failure
        return
    others = ["length" if cut and own else "stop"] * (len(leaves) - 1)
    assert [t.finish for t in made] == [*others, "length" if cut else "stop"]
    column = np.array([t.rewards.sum() for t in made], np.float32)
    sessions = sessions_of([t.session for t in made])
    if own:
        mine = [end / 4 + sum(said.get(turn.number, 0.0) for turn in session.path(leaf)) for leaf in leaves]
        assert column.tolist() == mean_by_session(column, sessions).tolist() == mine
        roots = [session.path(leaf)[0].number for leaf in leaves]
        assert [t.metrics["branch"] for t in made] == [sorted({*roots}).index(root) for root in roots]
    else:
        assert column.tolist() == [total] * len(leaves) and mean_by_session(column, sessions).tolist() == [total]
    found: dict[int, float] = {}
    for leaf, trajectory in zip(leaves, made, strict=True):
        path = session.path(leaf)
        for place, turn in enumerate(path):  # a token each, behind one that was given
            on, value = trajectory.loss_mask[2 * place + 1], float(trajectory.rewards[2 * place + 1])
            if turn is leaf:
                assert on, "the end of a branch is trained there"
            elif on and value:
                assert turn.number not in found, "a turn is rewarded once"
                found[turn.number] = value
            else:
                assert not value, "what another branch trains is rewarded there"
        assert not trajectory.rewards[::2].any()
    assert found == {number: value for number, value in said.items() if session.turns[number] not in leaves}


def test_the_same_task_has_the_same_column_as_environment_and_as_agent(
    tokenizers: dict[bool, Path], model: Any
) -> None:
    house = House(tokenizers[False], model, tool_calls="none")
    table = Table(tokenizers[False], model, **COUNTING, options={"turns": 3})
    try:
        (inside,) = table.play(house.lease(0, n=3))
    finally:
        table.maker.close()

    async def agent() -> None:
        house.desk.start(house.lease(0, n=3))
        for at_the_end in (False, True, False):
            held, text, rewards = await house.desk.open(1), "begin ab=", dict[str, float]()
            for number in range(1, 4):
                turn = await house.desk.completes(held, text)(ONCE)
                text += turn.message["content"] + f"turn {number}="
                rewards[str(turn.number)] = 0.5 * number
                if not at_the_end:
                    await house.desk.reward(held.id, 0.5 * number)
            await house.desk.finish(held.id, None, rewards=rewards if at_the_end else None)

    house.run(agent)
    assert isinstance(inside, Group)
    for mine, its in zip(group(house).trajectories, inside.trajectories, strict=True):
        assert lying(mine) == {0: 0.5, 1: 1.0, 2: 1.5}
        for name in ("tokens", "loss_mask", "versions", "rewards"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(its, name), strict=True)


async def asked_in_all_ways(client: httpx.AsyncClient, base: str) -> list[str]:
    """Ids of four turns, each of a conversation of its own."""
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": SAY}, "responses": {"input": "a"}, "completions": {"prompt": "ab"},
        "messages": {"messages": SAY, "max_tokens": 4},
    }  # fmt: skip
    return [(await client.post(f"{base}/{path}", json=body)).json()["id"] for path, body in bodies.items()]


def test_a_turn_is_called_by_the_id_of_its_answer_in_each_api(house: House) -> None:
    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            session = await opened(url, http)
            path = f"{url}/v1/sessions/{session['session']}"
            first = await http.post(f"{path}/reward", json={"reward": 1})
            assert (first.status_code, first.json()["error"]["code"]) == (404, "unknown_turn")
            ids = await asked_in_all_ways(http, session["base_url"])
            told = [await http.post(f"{path}/reward", json={"reward": 9, "turn": id}) for id in ids]
            assert [answer.json()["turn"] for answer in told] == [0, 1, 2, 3]
            again = [{"reward": 0.25, "turn": ids[0]}, {"reward": 0.5, "turn": 1}, {"reward": 4.0}]
            for body in [*again, *again]:  # whoever has not heard the answer
                assert (await http.post(f"{path}/reward", json=body)).status_code == 200
            end = {"reward": 8.0, "turn_rewards": {ids[2]: -1.0, "1": 0.125}, "truncated": True}
            assert (await http.post(f"{path}/finish", json=end)).status_code == 200

    served(house, agent)
    assert ending(house)["truncated"]
    rest = 8 + 0.25 + 0.125 - 1 + 4
    assert [lying(t) for t in group(house).trajectories] == [{0: rest}] * 4
    assert [t.session for t in group(house).trajectories] == [0] * 4


def refusals(path: str, other: str) -> Iterator[tuple[str, dict[str, Any] | str, tuple[int, str]]]:
    """What is said where, and how that is refused; ``other``: the name of another session."""
    unknown, invalid = (404, "unknown_turn"), (422, "invalid_request")
    for turn in (7, "resp_train-0-0-0-7", f"chatcmpl-{other}-0", "0x", "", "٣", "9" * 200):
        yield f"{path}/reward", {"reward": 1, "turn": turn}, unknown
        yield f"{path}/finish", {"reward": 1, "turn_rewards": {str(turn): 1}}, unknown
    for number in ("NaN", "Infinity", "-1e13", '"1"x', "null"):
        yield f"{path}/reward", f'{{"reward": {number}}}', invalid
    yield f"{path}/finish", {"reward": 1, "branches": "both"}, invalid
    yield f"{path}/finish", '{"turn_rewards": {"0": NaN}}', invalid
    for turn in ("true", "-1", "1.5", "[0]"):
        yield f"{path}/reward", f'{{"reward": 1, "turn": {turn}}}', invalid
    yield path.replace("train-0-0-0", "train-9-9-9") + "/reward", {"reward": 1}, (404, "unknown_session")


def test_what_cannot_be_a_turns_reward_is_refused_and_changes_nothing(house: House) -> None:
    house.desk._settled_at = 0.0

    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            session = await opened(url, http)
            path = f"{url}/v1/sessions/{session['session']}"
            await http.post(f"{session['base_url']}/chat/completions", json={"messages": SAY})
            assert (await http.post(f"{path}/reward", json={"reward": 0.5})).status_code == 200
            for where, said, (status, code) in refusals(path, "train-0-0-1"):
                content = {"json": said} if isinstance(said, dict) else {"content": said}
                told = await http.post(where, headers={"content-type": "application/json"}, **content)
                assert (told.status_code, told.json()["error"]["code"]) == (status, code), (where, said, told.text)
            large = await http.post(f"{path}/finish", json={"reward": 9e11, "turn_rewards": {"0": -9e11}})
            assert large.status_code == 422 and "1.8e+12" in large.text
            assert (await http.post(f"{path}/finish", json={"reward": 1.0})).status_code == 200
            late = await http.post(f"{path}/reward", json={"reward": 2})
            assert (late.status_code, late.json()["error"]["code"]) == (409, "session_ended")

    served(house, agent)
    assert [lying(t) for t in group(house).trajectories] == [{0: 1.5}]


def test_over_zeromq_a_turn_is_rewarded_too(house: House) -> None:
    async def agent(client: AsyncAgentClient) -> None:
        async with await client.session() as session:
            first = await session.chat(SAY)
            second = await session.chat([*SAY, first.message, {"role": "user", "content": "ba="}])
            await session.reward(0.25)
            for reward in (1.0, -0.5):
                await session.reward(reward, turn=first.turn)
            with pytest.raises(AgentRefusedError, match="is no answer of"):
                await session.reward(1.0, turn="chatcmpl-elsewhere-0")
            for number in (float("nan"), float("inf"), 1e13):
                with pytest.raises(AgentRefusedError, match="no number between"):
                    await session.reward(number)
                with pytest.raises(AgentRefusedError, match="no number between"):
                    await session.finish(turn_rewards={0: number})
            worth = {second.turn: 0.0, f"msg_{session.id}-1": 0.125}
            await session.finish(turn_rewards=worth, truncated=True, branches="own")
            with pytest.raises(AgentRefusedError, match="is finished") as late:
                await session.reward(1.0)
            assert (late.value.status, late.value.code) == (409, "session_ended")

    by_zeromq(house, agent)
    assert [lying(t) for t in group(house).trajectories] == [{0: -0.5, 1: 0.125}]
    assert (ending(house)["truncated"], ending(house)["branches"]) == (True, "own")


def test_nobody_else_rewards_a_session(house: House) -> None:
    house.desk._settled_at = 0.0

    async def agent() -> None:
        WHO.set(Visitor("alice"))
        held = await house.desk.open(1)
        await house.desk.chat(held, Conversation(SAY))
        for ended in (False, True):
            WHO.set(Visitor("bob"))
            with pytest.raises(AgentError, match="there is no session"):
                await house.desk.reward(held.id, 1.0)
            WHO.set(Visitor("alice"))
            if not ended:
                await house.desk.finish(held.id, 0.5)

    house.run(agent)
    assert float(group(house).trajectories[0].rewards.sum()) == 0.5


@pytest.mark.parametrize("worth", [0.0, 0.5])
def test_turns_alone_may_say_how_good_a_session_was(house: House, worth: float) -> None:
    async def agent() -> None:
        held = await house.desk.open(1)
        await house.desk.chat(held, Conversation(SAY))
        with pytest.raises(AgentError, match="this task has no other reward"):
            await house.desk.finish(held.id, None)
        await house.desk.reward(held.id, worth)
        await house.desk.finish(held.id, None)

    house.run(agent)
    assert float(group(house).trajectories[0].rewards.sum()) == worth


@pytest.mark.parametrize(("source", "words"), [("math", "`environment` for the source 'math'"), ("", "`environment`,")])
def test_where_nobody_reads_them_rewards_of_turns_are_refused(
    tokenizers: dict[bool, Path], model: Any, source: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are other rewards wanted of these agents, which is told once; those of another source say how good their
    sessions were."""
    told = CapturingLogger()
    monkeypatch.setattr(measured, "log", told)
    monkeypatch.setattr(measured, "_unread", set())
    house = House(tokenizers[True], model, reads="games".__eq__)

    async def agent() -> None:
        house.desk.start(house.lease(0, source=source))
        held = await house.desk.open(1)
        await house.desk.chat(held, Conversation(SAY))
        with pytest.raises(AgentError, match=rf"reward\.functions have no {words}"):
            await house.desk.reward(held.id, 1.0)
        with pytest.raises(AgentError, match=rf"reward\.functions have no {words}"):
            await house.desk.finish(held.id, None, rewards={"0": 1.0})
        await house.desk.finish(held.id, 3.0)
        house.desk.start(house.lease(2, source=source))
        await house.desk.finish((await house.desk.open(1)).id, 3.0)
        assert [call.kwargs for call in told.calls] == [{"source": source} if source else {}]
        house.desk.start(house.lease(1, source="games"))
        held = await house.desk.open(1)
        await house.desk.chat(held, Conversation(SAY))
        with pytest.raises(AgentError, match="this task has no other reward"):
            await house.desk.finish(held.id, None)
        await house.desk.reward(held.id, 0.5)
        await house.desk.finish(held.id, None)

    house.run(agent)
    assert [float(group(house, number).trajectories[0].rewards.sum()) for number in (1, 2)] == [0.5, 0.0]


async def two_turns(house: House) -> tuple[str, list[Turn]]:
    held = await house.desk.open(1)
    first = await house.desk.chat(held, Conversation(SAY))
    more = [*first.said, {"role": "user", "content": "ba="}]
    return held.id, [first, await house.desk.chat(held, Conversation(more))]


@pytest.mark.parametrize("ended", [False, True])
def test_a_gateway_that_dies_after_a_reward_loses_none(house: House, ended: bool) -> None:
    """Also one that has been replaced, and one of a session that has ended before its group has."""
    house.open().start(house.lease(1, n=2))

    async def agent() -> None:
        id, _ = await two_turns(house)
        for reward, turn in ((1.0, 0), (0.5, 1), (0.25, 0)):
            await house.desk.reward(id, reward, turn)
        if ended:
            await house.desk.finish(id, 2.0, rewards={"1": 0.0})
        house.open().start(house.lease(1, n=2))
        if ended:
            with pytest.raises(AgentError, match="is finished"):
                await house.desk.reward(id, 4.0, 0)
        else:
            await house.desk.reward(id, 0.0, 1)
            house.open().start(house.lease(1, n=2))
        await house.desk.finish(id, 2.0)
        await house.desk.finish((await two_turns(house))[0], 1.0)

    house.run(agent)
    assert [lying(t) for t in group(house, 1).trajectories] == [{0: 0.25, 1: 2.0}, {1: 1.0}]


def test_a_reward_is_durable_before_its_agent_hears_of_it(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def agent() -> None:
        id, _ = await two_turns(house)
        await house.desk.reward(id, 1.0, 0)
        with monkeypatch.context() as patched:
            away = Away(house, patched)
            saying = [asyncio.ensure_future(house.desk.reward(id, reward, 0)) for reward in (0.25, 0.5)]
            saying.append(asyncio.ensure_future(house.desk.finish(id, 2.0)))
            await asyncio.sleep(0.05)
            assert not any(said.done() for said in saying)
            away.back(DeadlineError("no answer"))
            with pytest.raises(AgentError, match="the broker does not answer; ask again"):
                await saying[0]
            await asyncio.sleep(0.05)
            away.back()
            await asyncio.sleep(0.05)
            away.back()
            await asyncio.wait_for(asyncio.gather(*saying[1:]), 5)

    house.run(agent)
    assert lying(group(house).trajectories[0]) == {0: 0.5, 1: 2.0}, "what was said first is done first"


def test_who_takes_a_session_after_another_has_none_of_its_rewards(house: House) -> None:
    async def agent() -> None:
        id, _ = await two_turns(house)
        await house.desk.reward(id, 1.0, 0)
        await house.desk.abandon(await house.desk.find(id), "given up")
        house.open().start(house.lease(0))
        other, turns = await two_turns(house)
        assert [turn.number for turn in turns] == [2, 3]
        with pytest.raises(AgentError, match="is no answer of"):
            await house.desk.reward(other, 1.0, 0)
        await house.desk.finish(other, 0.5)

    house.run(agent)
    assert lying(group(house).trajectories[0]) == {1: 0.5}
