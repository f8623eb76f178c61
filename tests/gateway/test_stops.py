"""An answer is told without the text that its agent had it end with; what was sampled is trained on as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest

from penstock.protocols.experience import Group
from penstock.services.gateway.conversation import Conversation
from penstock.services.gateway.questions import ONCE
from penstock.services.gateway.replies import Replies
from penstock.services.gateway.session import Turn
from penstock.services.turns.answers import Answer
from penstock.services.turns.tokenizer import Tokenizer
from tests.gateway.house import House
from tests.gateway.test_doors import SAY, opened, served

STOPS = list("abcdefghijklmnop")


@pytest.fixture
def house(tokenizers: dict[bool, Path], model: Any) -> House:
    made = House(tokenizers[True], model, tool_calls="none")
    made.desk.start(made.lease(0, n=2, new=8))
    return made


def last(house: House) -> str:
    """What was sampled last, as text."""
    return house.text.decode([house.engines_own[-1].tokens.tolist()])[0]


@pytest.mark.parametrize(
    ("stops", "told"),
    [((), ("ab=c", "")), (("=", "c"), ("ab", "=")), (("c", "b="), ("a", "b=")), (("d",), ("ab=c", ""))],
)
def test_the_first_of_the_stops_ends_a_text(
    tokenizers: dict[bool, Path], stops: tuple[str, ...], told: tuple[str, str]
) -> None:
    text, none = Tokenizer(str(tokenizers[True])), np.zeros(0, np.float32)
    answer = Answer(text.encode_text("ab=c"), none, none)
    lease: Any = None
    message, stop = Replies(text, "none").message(lease, 0, 0, answer, "", stops)
    assert (message["content"], stop) == told


def test_a_special_token_among_the_stops_ends_an_answer(tokenizers: dict[bool, Path], model: Any) -> None:
    """No text shows it; the run's own stops are none."""
    house = House(tokenizers[True], model, tool_calls="none", max_turns=400)
    house.desk.start(house.lease(0, new=16))
    (unknown,) = house.text.special_ids(["<unk>"])

    async def play() -> Turn:
        held = await house.desk.open(1)
        turn = await house.desk.chat(held, Conversation(SAY), stop=["z", "<unk>"])
        while turn.stopped_by != "<unk>":
            assert unknown not in turn.answer.tokens
            turn = await house.desk.chat(held, Conversation(SAY), stop=["z", "<unk>"])
        house.open().start(house.lease(0, new=16))
        kept = (await house.desk.find(held.id)).session.turns[turn.number]
        assert (kept.message, kept.stopped_by) == (turn.message, "<unk>")
        return turn

    turn = house.run(play)
    assert turn.answer.finish == "stop" and np.flatnonzero(turn.answer.tokens == unknown) == len(turn.answer.tokens) - 1
    assert turn.message["content"] == house.text.decode([turn.answer.tokens.tolist()])[0]


def test_clients_are_told_what_ended_an_answer_and_not_with_it(house: House) -> None:
    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            session = await opened(url, http)
            base = session["base_url"]
            async with openai.AsyncOpenAI(base_url=base, api_key="none") as client:
                told: Any = None
                said = ""
                while not said or said == last(house):  # an answer without a word reads as the next one without
                    told = await client.chat.completions.create(model="p", messages=SAY, stop=STOPS)
                    said = told.choices[0].message.content or ""
                assert last(house)[len(said)] in STOPS and not set(said) & set(STOPS)
                then: Any = [*SAY, told.choices[0].message, {"role": "user", "content": "b"}]
                more = await client.chat.completions.create(model="p", messages=then)
                turns = house.desk._held[session["session"]].session.turns
                assert (
                    turns[more.model_extra["penstock"]["turns"][0]].parent == told.model_extra["penstock"]["turns"][0]
                )
            own = {"base_url": base.removesuffix("/v1"), "api_key": "none"}
            async with anthropic.AsyncAnthropic(**own) as claude:
                about: Any = {"model": "p", "max_tokens": 8, "messages": SAY, "stop_sequences": STOPS}
                for streamed in (False, True):
                    answer: Any = None
                    while answer is None or answer.stop_reason != "stop_sequence":
                        if streamed:
                            async with claude.messages.stream(**about) as stream:
                                answer = await stream.get_final_message()
                        else:
                            answer = await claude.messages.create(**about)
                        if answer.stop_reason != "stop_sequence":
                            assert answer.stop_sequence is None and answer.content[0].text == last(house)
                    text = answer.content[0].text
                    assert last(house).startswith(text + answer.stop_sequence) and answer.stop_sequence in STOPS

    served(house, agent)


def test_a_stopped_turn_is_gone_on_from_also_after_a_takeover(house: House) -> None:
    """In text, an agent that puts the stop there again says it once."""

    async def play() -> list[Turn]:
        held = await house.desk.open(1)
        chat = text = await house.desk.completes(held, "sort ba=", stop=STOPS)(ONCE)
        while not text.stopped_by or not text.message["content"]:  # nothing said reads as the question before it
            text = await house.desk.completes(held, "sort ba=", stop=STOPS)(ONCE)
        while not chat.stopped_by or "text" in chat.said[0]:
            chat = await house.desk.chat(held, Conversation(SAY), stop=STOPS)
        house.open().start(house.lease(0, n=2, new=8))
        held = await house.desk.find(held.id)
        for turn in (text, chat):
            kept = held.session.turns[turn.number]
            assert (kept.message, kept.stopped_by, kept.said) == (turn.message, turn.stopped_by, turn.said)
        spoken = "sort ba=" + text.message["content"] + text.stopped_by + "21"
        on = await house.desk.completes(held, spoken)(ONCE)
        assert on.parent == text.number and house.text.decode([on.given.tolist()]) == ["21"]
        also = await house.desk.chat(held, Conversation([*SAY, chat.message, {"role": "user", "content": "b"}]))
        assert also.parent == chat.number
        await house.desk.finish(held.id, 1.0)
        await house.desk.finish((await house.desk.open(1)).id, 0.0)
        return [text, on]

    house.run(play)
    made = house.delivered["train", 0]
    assert isinstance(made, Group)
    assert sum(t.sampled for t in made.trajectories) == sum(len(a.tokens) for a in house.engines_own)
