"""Agents that show the policy pictures, in each API's own words: what is trained on shows what was shown."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from penstock.protocols.experience import PICTURE, Group, Prompt
from penstock.protocols.packed_groups import pack_group, unpack_group
from penstock.services.gateway import pictures, policy
from penstock.services.gateway.chat import ChatRequest
from penstock.services.gateway.config import GatewayConfig
from penstock.services.gateway.conversation import Conversation
from penstock.services.gateway.desk import Desk
from penstock.services.gateway.errors import AgentError
from penstock.services.gateway.http import described
from penstock.services.gateway.messages import MessagesRequest
from penstock.services.gateway.questions import Asking
from penstock.services.gateway.responses import ResponsesRequest
from penstock.services.gateway.work import Held
from penstock.services.modeling.load import load_model
from penstock.services.modeling.sight import check_shown, give_sight
from penstock.services.turns.answers import Answer
from tests import seeing, shown
from tests.gateway.house import House
from tests.trainer.test_seeing import scored

SEED = 1
"""With which the policy, which has random weights, says nothing that stands for a picture."""
RED, GREEN, BLUE = (shown.picture(shown.COLOURS[name]) for name in "rgb")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    seeing.write("qwen2_5_vl", found)
    return found


@pytest.fixture
def house(folder: Path) -> House:
    engine, text = seeing.engine(folder, 160)
    made = House(engine=engine, text=text, max_length=160, pictures=True)
    made.seed = SEED
    return made


def in_base64(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


def in_chat(*parts: str | bytes) -> dict[str, Any]:
    """A user's message, as chat completions have one."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{in_base64(part)}", "detail": "low"}}
        for part in parts
    ]
    return {"role": "user", "content": content}


def chat(*messages: dict[str, Any]) -> Conversation:
    return ChatRequest.model_validate({"messages": messages}).talk


def delivered(house: House, folder: Path) -> Group:
    """The group, in which engine and trainer have seen the same."""
    made = house.delivered["train", 0]
    assert isinstance(made, Group), made
    found = unpack_group(pack_group(made))
    model = load_model(str(folder), "float32", torch.device("cpu")).eval()
    give_sight(model, str(folder), "float32", torch.device("cpu"))
    trajectories = list(found.trajectories)
    check_shown(model, trajectories)
    for trajectory, values in zip(trajectories, scored(model, trajectories), strict=True):
        said = trajectory.loss_mask == 1
        assert said.any() and np.abs(trajectory.logprobs[said] - values[said]).max() < 1e-5
    assert sum(len(answer.tokens) for answer in house.engines_own) == sum(t.sampled for t in trajectories)
    return found


def test_each_branch_shows_what_its_turns_were_shown_also_after_a_takeover(house: House, folder: Path) -> None:
    house.desk.start(house.lease(0, new=3))

    async def begin() -> tuple[str, list[dict[str, Any]]]:
        held = await house.desk.open(1)
        first = [in_chat("see ", RED, " or ", GREEN)]
        turn = await house.desk.chat(held, chat(*first))
        assert turn.pictures == (RED, GREEN)
        more = [*first, turn.message, {"role": "user", "content": f"{PICTURE} is but a word"}]
        turn = await house.desk.chat(held, chat(*more))
        assert turn.pictures == () and turn.parent == 0
        assert house.desk.count(held, chat(*more, turn.message, in_chat(BLUE))) > turn.size
        return held.id, [*more, turn.message]

    async def go_on(id: str, more: list[dict[str, Any]]) -> None:
        held = await house.desk.find(id)
        turn = await house.desk.chat(held, chat(*more, in_chat(BLUE)))
        assert turn.parent == 1 and turn.pictures == (BLUE,)
        again = await house.desk.chat(held, chat(in_chat("see ", RED, " or ", RED)))
        assert again.parent is None, "another picture is another conversation"
        await house.desk.finish(id, 1.0)

    id, more = house.run(begin)
    house.open().start(house.lease(0, new=3))  # which knows of it what the broker has kept
    house.run(lambda: go_on(id, more))
    one, other = delivered(house, folder).trajectories
    assert one.pictures == (RED, GREEN, BLUE) and other.pictures == (RED, RED)


def test_what_turns_show_again_is_kept_once(house: House) -> None:
    """As by an agent that keeps the last two screens alone, so that each turn begins another conversation."""
    house.desk.start(house.lease(0, new=2))
    shots = [shown.picture((number, 0, 0)) for number in range(4)]

    async def begin() -> str:
        held = await house.desk.open(1)
        for at in range(3):
            await house.desk.chat(held, chat(in_chat("see ", *shots[at : at + 2])))
        return held.id

    async def go_on(id: str) -> None:
        held = await house.desk.find(id)
        turn = await house.desk.chat(held, chat(in_chat("see ", shots[3], shots[0])))
        assert turn.pictures == (shots[3], shots[0])
        await house.desk.finish(id, 1.0)

    id = house.run(begin)
    assert sorted(pictures_kept(house)) == sorted(shots)
    house.open().start(house.lease(0, new=2))
    house.run(lambda: go_on(id))
    made = house.delivered["train", 0]
    assert isinstance(made, Group)
    assert [t.pictures for t in made.trajectories] == [*pairwise(shots), (shots[3], shots[0])]


def pictures_kept(house: House) -> list[bytes]:
    """By the broker."""
    return [data.tobytes() for name, data in house.records["train", 0].items() if name.startswith("picture.")]


def test_what_all_choices_and_sessions_show_is_kept_once(house: House) -> None:
    house.desk.start(house.lease(0, n=2, new=2))
    notes: list[str] = []
    say = house.desk._records._ask
    house.desk._records._ask = lambda message, deadline_s: (notes.append(message.name), say(message, deadline_s))[1]  # type: ignore[attr-defined]

    async def agents() -> None:
        several = [await house.desk.open(1) for _ in range(2)]
        asks = [house.desk.chats(held, chat(in_chat("see ", RED))) for held in several for _ in range(4)]
        turns = await asyncio.gather(*(ask(Asking()) for ask in asks))
        assert len({(turn.number, id(turn)) for turn in turns}) == 8 and all(turn.pictures == (RED,) for turn in turns)

    house.run(agents)
    assert pictures_kept(house) == [RED] and sum(name.startswith("picture.") for name in notes) == 1


def test_a_conversation_in_which_a_pictures_token_was_sampled_is_not_gone_on_from(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    pad = house.text.plain.convert_tokens_to_ids("<|image_pad|>")
    unpacked = policy.unpack_answer

    def sampled(data: bytes) -> Answer:
        answer = unpacked(data)
        return dataclasses.replace(answer, tokens=np.r_[pad, answer.tokens[1:]].astype(np.int32))

    monkeypatch.setattr(policy, "unpack_answer", sampled)
    house.desk.start(house.lease(0))

    async def agent() -> None:
        held = await house.desk.open(1)
        first = in_chat("see ", RED)
        turn = await house.desk.chat(held, chat(first))
        with pytest.raises(AgentError, match="has said what stands for a part of a picture"):
            await house.desk.chat(held, chat(first, turn.message, {"role": "user", "content": "b"}))
        words = await house.desk.chat(held, chat({"role": "user", "content": "a"}))
        more = chat({"role": "user", "content": "a"}, words.message, {"role": "user", "content": "b"})
        assert (await house.desk.chat(held, more)).parent == words.number, "where nothing is shown it is a word"

    house.run(agent)


def test_all_apis_show_alike(house: House, folder: Path) -> None:
    house.desk.start(house.lease(0, n=3, new=2))
    source = {"type": "base64", "media_type": "image/png", "data": in_base64(RED)}
    result = [{"type": "image", "source": source | {"data": in_base64(GREEN)}}, {"type": "text", "text": "b"}]

    async def in_responses(desk: Desk, held: Held) -> None:
        part = {"type": "input_image", "image_url": f"data:image/png;base64,{in_base64(RED)}"}
        first = {"role": "user", "content": [{"type": "input_text", "text": "is "}, part]}
        turn = await desk.chat(held, ResponsesRequest(input=[first]).talk(held.id, held.session))
        called = {
            "type": "function_call_output",
            "call_id": "x",
            "output": [part, {"type": "input_text", "text": "b"}],
        }
        asked = ResponsesRequest(input=[called], previous_response_id=f"resp_{held.id}-{turn.number}")
        turn = await desk.chat(held, asked.talk(held.id, held.session))
        assert turn.parent == 0 and turn.pictures == (RED,)
        anew = asked.model_copy(update={"instructions": "look"})  # another beginning, and the pictures of before
        turn = await desk.chat(held, anew.talk(held.id, held.session))
        assert turn.parent is None and turn.pictures == (RED, RED)

    async def agents() -> None:
        desk = house.desk
        held = await desk.open(1)
        said = [{"role": "user", "content": [{"type": "text", "text": "is "}, {"type": "image", "source": source}]}]
        turn = await desk.chat(held, MessagesRequest(messages=said, max_tokens=2).talk)
        answer = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": result}]}
        told = [*said, {"role": "assistant", "content": turn.message["content"]}, answer]
        turn = await desk.chat(held, MessagesRequest(messages=told, max_tokens=2).talk)
        assert turn.parent == 0 and turn.pictures == (GREEN,)
        await desk.finish(held.id, 1.0)
        await in_responses(desk, held := await desk.open(1))
        await desk.finish(held.id, 1.0)
        held = await desk.open(1)
        of_client = [{"role": "user", "content": [{"type": "text", "text": "is "}, {"type": "image", "image": RED}]}]
        await desk.chat(held, chat(*of_client))
        await desk.finish(held.id, 1.0)

    house.run(agents)
    found = delivered(house, folder).trajectories
    assert [t.pictures for t in found] == [(RED, GREEN), (RED, RED), (RED, RED), (RED,)]
    first = [t.tokens[: int(np.flatnonzero(t.loss_mask)[0])].tolist() for t in found]
    assert first[0] == first[1] == first[3]


def test_what_cannot_be_shown_is_refused(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.desk.start(house.lease(0))
    for url, why in (
        ("https://x.org/a.png", "is not fetched: send the picture itself, as a data: URL"),
        ("data:image/png,abc", "a picture's data: URL is in base64"),
        ("data:image/png;base64,?", "not in base64"),
        (f"data:image/png;base64,{in_base64(b'nothing')}", "7 bytes that are no picture"),
        ("", "has no picture: give it as a data: URL"),
    ):
        part = {"type": "image_url", "image_url": {"url": url}}
        with pytest.raises(ValidationError, match=why):
            chat({"role": "user", "content": [part]})
        image = {"type": "image", "source": {"type": "base64", "data": url}}
        with pytest.raises(ValidationError, match=why):
            MessagesRequest.model_validate({"messages": [{"role": "user", "content": [image]}], "max_tokens": 1})

    async def agent() -> None:
        held = await house.desk.open(1)
        first = await house.desk.chat(held, chat(in_chat("<|image_pad|>")))  # as a word, while nothing is shown
        more = {"role": "assistant", "content": first.message["content"]}
        cut = shown.picture(shown.COLOURS["r"], (64, 64))[:-30]
        for said, code, why in (
            (
                [in_chat("<|image_pad|>"), more, in_chat(RED)],
                "invalid_messages",
                "the words say .* which stands for a picture: leave it out",
            ),
            ([in_chat("<|image_pad|>", RED)], "invalid_messages", "leave it out of the words"),
            ([in_chat(RED, cut)], "cannot_answer", "PNG, 64 x 64, .* cannot be read to its end"),
        ):
            with pytest.raises(AgentError, match=why) as refused:
                await house.desk.chat(held, chat(*said))
            assert refused.value.code == code
        for limit, most, why in (
            ("MOST_BYTES", 50, "a conversation shows at most 50 bytes of pictures, and this would show "),
            ("MOST_PICTURES", 1, "a conversation shows at most 1 pictures, and this would show 2: show fewer"),
            ("MOST_PIXELS", 100, "a conversation shows at most 100 pixels, and this"),
        ):
            with monkeypatch.context() as narrow, pytest.raises(AgentError, match=why):
                narrow.setattr(pictures, limit, most)
                await house.desk.chat(held, chat(in_chat(RED, RED)))
        held.session.room = 50
        with pytest.raises(AgentError, match="a session shows at most 50 bytes of pictures, and this would show"):
            await house.desk.chat(held, chat(in_chat(RED)))
        house._config = GatewayConfig()
        house.open().start(house.lease(1))
        held = await house.desk.open(1)
        with pytest.raises(AgentError, match="gateway.pictures is false"):
            await house.desk.chat(held, chat(in_chat(RED)))

    house.run(agent)


def test_a_task_that_shows_pictures_arrives_with_them(house: House, folder: Path) -> None:
    prompt = Prompt(index=0, messages=[{"role": "user", "content": f"{PICTURE}is"}], pictures=(RED,))
    house.desk.start(house.lease(0).model_copy(update={"prompt": prompt}))

    async def agent() -> None:
        held = await house.desk.open(1)
        assert described(held, "")["task"]["pictures"] == [f"data:image/png;base64,{in_base64(RED)}"]
        await house.desk.finish(held.id, 0.0)

    house.run(agent)
    made = house.delivered["train", 0]
    assert isinstance(made, Group) and made.trajectories[0].pictures == (RED,)
    model = load_model(str(folder), "float32", torch.device("cpu")).eval()
    give_sight(model, str(folder), "float32", torch.device("cpu"))
    check_shown(model, list(made.trajectories))
