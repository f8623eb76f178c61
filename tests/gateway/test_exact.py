"""What is delivered is what was served: random sessions against the engine's own record, bit for bit."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.protocols.experience import Group, Trajectory
from penstock.protocols.packed_groups import pack_group, unpack_group
from penstock.services.gateway import desk
from penstock.services.gateway.conversation import Conversation
from penstock.services.gateway.desk import Desk
from penstock.services.gateway.errors import AgentError
from penstock.services.gateway.questions import Asking
from penstock.services.gateway.session import Turn
from penstock.services.gateway.work import Held
from tests.gateway.house import CALLS, House

TOOLS = [{"type": "function", "function": {"name": "reveal", "parameters": {"type": "object"}}}]


async def wander(desk: Desk, held: Held, chance: random.Random) -> None:
    """An agent of many turns, until no room is left."""
    try:
        await _wander(desk, held, chance)
    except AgentError as error:
        assert error.code == "context_length_exceeded", error


async def _wander(desk: Desk, held: Held, chance: random.Random) -> None:
    """It goes back, rewrites its history, asks again, speaks in tokens, and forgets."""
    chats: list[list[dict[str, Any]]] = [[{"role": "user", "content": "sort ba="}]]
    heard: list[Turn] = []
    for _ in range(chance.randint(1, 6)):
        messages = chance.choice(chats)
        if chance.random() < 0.15:  # as a template or an agent does that drops what was said
            messages = [{"role": "user", "content": f"sort {chance.choice('abc')}="}]
        if chance.random() < 0.15 and heard:
            turn = chance.choice(heard)
            tokens = np.r_[held.session.tokens(turn), np.array([5, 6], np.int32)].astype(np.int32)
            heard.append(await desk.generate(held, tokens, 3))
            continue
        tools = chance.choice([None, TOOLS])
        beside = chance.choice([None, None, {"level": "a"}, {"level": "b"}])
        asked = Conversation(messages, tools, beside if desk._text.has_template else None)
        turn = await desk.chat(held, asked, chance.choice([None, 2]))
        if chance.random() < 0.2:
            assert await desk.chat(held, asked, None, asked=Asking(again=True)) is not None
        if chance.random() < 0.2:
            same = Asking(key="r")
            assert await desk.chat(held, asked, asked=same) is await desk.chat(held, asked, asked=same)
        heard.append(turn)
        answer = {"role": "tool", "tool_call_id": "x", "content": "ab"} if tools else {"role": "user", "content": "c"}
        chats.append([*messages, turn.message, answer])


def sampled(trajectories: list[Trajectory]) -> Counter[bytes]:
    """Runs of sampled tokens, each with its log-probabilities and versions."""
    found: Counter[bytes] = Counter()
    for t in trajectories:
        edges = np.flatnonzero(np.diff(np.r_[0, t.loss_mask, 0]))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            found[b"".join(a[start:end].tobytes() for a in (t.tokens, t.logprobs, t.versions))] += 1
    return found


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("taken_over", [False, True])
def test_every_sampled_token_is_delivered_once_as_the_engine_said_it(
    tokenizers: dict[bool, Path], model: Any, chat: bool, taken_over: bool
) -> None:
    if chat:
        pytest.importorskip("jinja2")
    house = House(tokenizers[chat], model, tool_calls=CALLS)
    if chat:  # which looks at what it is told beside
        house.text.plain.chat_template += "{{ level }}"
    chance = random.Random(int(chat) + 2 * int(taken_over))
    # Without a template no tools can be told of in a chat: the desk's own rule is the same for both.
    count = 40

    async def play() -> None:
        for number in range(count):
            house.desk.start(house.lease(number))
            held = await house.desk.open(1)
            await wander(house.desk, held, chance)
            if taken_over and chance.random() < 0.5:  # the gateway dies; another one has only what was kept
                house.open().start(house.lease(number))
                held = await house.desk.find(held.id)
                await wander(house.desk, held, chance)
            await house.desk.finish(held.id, 0.5)

    house.run(play, 120)
    found = []
    for made in house.delivered.values():
        assert isinstance(made, Group), made
        group = unpack_group(pack_group(made))
        assert all(float(t.rewards.sum()) == 0.5 for t in group.trajectories)
        found += list(group.trajectories)
    wanted: Counter[bytes] = Counter()
    for answer in house.engines_own:
        wanted[b"".join(a.tobytes() for a in (answer.tokens, answer.logprobs.clip(max=0), answer.versions))] += 1
    assert len(house.delivered) == count and sum(wanted.values()) > 2 * count
    # Two turns may follow each other without a token between them: then they are one run. Compare token by token.
    assert sum(t.sampled for t in found) == sum(len(answer.tokens) for answer in house.engines_own)
    assert sum((sampled(found) & wanted).values()) > 0.9 * sum(wanted.values())
    for trajectory in found:
        assert trajectory.loss_mask.any() and trajectory.tokens[0] >= 0


def test_a_turn_that_nobody_was_left_to_hear_is_not_trained_on(tokenizers: dict[bool, Path], model: Any) -> None:
    house = House(tokenizers[False], model)

    async def play() -> None:
        house.desk.start(house.lease(0))
        held = await house.desk.open(1)
        say = [{"role": "user", "content": "sort ba="}]
        lost = await house.desk.chat(held, Conversation(say))
        lost.wanted = False
        first = await house.desk.chat(held, Conversation(say))
        await house.desk.chat(held, Conversation([*say, first.message, {"role": "user", "content": "c"}]))
        await house.desk.finish(held.id, 1.0)

    house.run(play)
    made = house.delivered["train", 0]
    assert isinstance(made, Group) and len(made.trajectories) == 1
    answers = house.engines_own
    assert made.trajectories[0].sampled == len(answers[1].tokens) + len(answers[2].tokens)


def test_sessions_of_silent_agents_are_given_again_and_fail_in_the_end(
    tokenizers: dict[bool, Path], model: Any
) -> None:
    house = House(tokenizers[False], model, idle_s=0.05, attempts=2)

    async def play() -> list[str]:
        house.desk.start(house.lease(0))
        names = []
        for _ in range(2):
            held = await house.desk.open(1)
            names.append(held.id)
            await house.desk.chat(held, Conversation([{"role": "user", "content": "sort ba="}]))
            held.touched -= 1
            house.desk.expire()
            while held.id in {row["session"] for row in house.desk.rows()}:
                await asyncio.sleep(0.01)
        return names

    assert len(set(house.run(play))) == 2
    made = house.delivered["train", 0]
    assert isinstance(made, Group) and "silent" in made.trajectories[0].failure


def test_who_waits_for_an_answer_is_told_that_the_run_is_over(tokenizers: dict[bool, Path], model: Any) -> None:
    house = House(tokenizers[False], model)

    async def play() -> str:
        house.desk.start(house.lease(0))
        held = await house.desk.open(1)
        house.engine.submit = lambda request: None  # type: ignore[method-assign] - it never answers
        asked = asyncio.ensure_future(house.desk.chat(held, Conversation([{"role": "user", "content": "sort ba="}])))
        await asyncio.sleep(0.05)
        house.desk.end("all steps are trained")
        try:
            await asyncio.wait_for(asked, 5)
        except AgentError as error:
            return error.code
        return "answered"

    assert house.run(play) == "run_over"


def test_groups_that_no_agent_is_at_are_given_back_and_go_on_elsewhere(
    tokenizers: dict[bool, Path], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "UNASKED_S", 0.05)
    house = House(tokenizers[False], model)
    gave_back: list[Any] = []

    async def play() -> None:
        first = house.desk
        first._gave_back = gave_back.append
        first.start(house.lease(0, n=2))
        first.start(house.lease(1))
        held = await first.open(1)
        await first.chat(held, Conversation([{"role": "user", "content": "sort ba="}]))
        await asyncio.sleep(0.1)
        first.expire()
        assert gave_back == [("train", 1)], "an agent is at the other"
        await first.finish(held.id, 1.0)
        await asyncio.sleep(0.1)
        first.expire()
        assert gave_back == [("train", 1), ("train", 0)] and not first.rows()
        with pytest.raises(AgentError, match="no task is free"):
            await first.open(0)
        other = house.open()
        other.start(house.lease(0, n=2))
        second = await other.open(1)
        assert second.id == "train-0-1-0", "what was finished elsewhere is known"
        await other.chat(second, Conversation([{"role": "user", "content": "sort ba="}]))
        await other.finish(second.id, 0.0)

    house.run(play)
    made = house.delivered["train", 0]
    assert isinstance(made, Group) and [float(t.rewards.sum()) for t in made.trajectories] == [1.0, 0.0]


def test_a_message_that_is_refused_costs_no_session_unless_the_group_is_another_gateways(
    tokenizers: dict[bool, Path], model: Any
) -> None:
    house = House(tokenizers[False], model)
    question = [{"role": "user", "content": "sort ba="}]

    async def play() -> None:
        house.desk.start(house.lease(0, n=2))
        held = await house.desk.open(1)
        for code, status, left in (("failed", 503, 1), ("not_held", 410, 0)):
            house.refuse = code
            for ask in (house.desk.chat(held, Conversation(question)), house.desk.finish(held.id, 1.0)):
                with pytest.raises(AgentError) as refused:
                    await ask
                assert refused.value.status in (status, 404) and len(house.desk.rows()) == left
            if left:
                house.refuse = ""
                await house.desk.chat(held, Conversation(question))

    house.run(play)
