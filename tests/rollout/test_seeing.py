"""Prompts that show pictures, made into groups: what each trajectory shows arrives with it, and nothing else does."""

from __future__ import annotations

import dataclasses
import queue
import time
from typing import Any

import numpy as np
import pytest
import torch

from penstock.protocols import wire
from penstock.protocols.experience import PICTURE, ExperienceError, Group, Prompt, Sampling
from penstock.protocols.messages import Lease
from penstock.protocols.packed_groups import pack_group, unpack_group
from penstock.services.environments.config import EnvironmentConfig
from penstock.services.modeling.load import load_model
from penstock.services.modeling.sight import check_shown, give_sight
from penstock.services.rollout.config import GivenConfig
from penstock.services.rollout.engines.torch.engine import TorchEngine
from penstock.services.rollout.multi_turn import MultiTurn
from penstock.services.rollout.single_turn import SingleTurn
from penstock.services.turns.given import given_trajectory
from penstock.services.turns.tokenizer import TextError, Tokenizer
from tests import seeing, shown
from tests.trainer.test_seeing import scored

RED, GREEN = (shown.picture(shown.COLOURS[name]) for name in "rg")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[TorchEngine, Tokenizer]:
    folder = tmp_path_factory.mktemp("model")
    seeing.write("qwen2_5_vl", folder)
    return seeing.engine(folder)


def lease(**more: Any) -> Lease:
    asked = [{"role": "user", "content": f"{PICTURE}is"}]
    prompt = Prompt(index=3, messages=asked, truth="r", pictures=(RED,), **more)
    sampling = Sampling(n=3, max_new_tokens=4, greedy_baseline=True)
    return Lease(purpose="train", number=0, attempt=1, seed=5, prompt=prompt, sampling=sampling, version=0)


def made(maker: Any, engine: TorchEngine, inbox: queue.Queue[object], leased: Lease) -> Group:
    found, deadline = maker.start(leased), time.monotonic() + 60
    while found is None:
        assert time.monotonic() < deadline
        for result in engine.step():
            found = found or maker.take(result)
        try:
            found = found or maker.heard(inbox.get(timeout=0 if engine.pending() else 0.1))
        except queue.Empty:
            pass
    assert isinstance(found[1], Group), found[1]
    return unpack_group(pack_group(found[1]))


def test_all_answers_show_what_their_prompt_does(engine: tuple[TorchEngine, Tokenizer]) -> None:
    maker = SingleTurn(*engine, GivenConfig(answers=1), 96)
    group = made(maker, engine[0], queue.Queue(), lease(answer="r"))
    assert [t.given for t in group.trajectories] == [False, False, True, False]
    assert all(t.pictures == (RED,) for t in group.trajectories) and not engine[0]._shown


def test_a_group_has_each_picture_once(engine: tuple[TorchEngine, Tokenizer]) -> None:
    group = made(SingleTurn(*engine, max_length=96), engine[0], queue.Queue(), lease())
    shows = [(), (RED, GREEN, RED), (GREEN,), (RED,)]
    changed = [dataclasses.replace(t, pictures=each) for t, each in zip(group.trajectories, shows, strict=True)]
    packed = pack_group(Group(0, group.prompt, changed))
    assert packed.count(GREEN) == packed.count(RED) == 1
    assert [t.pictures for t in unpack_group(packed).trajectories] == shows
    fields = wire.unpack(packed)
    for odd in ({"shows": [[0], [2], [], []]}, {"pictures": [7]}, {"shows": [[0], [-1], [], []]}):
        with pytest.raises(ExperienceError):
            unpack_group(wire.pack(fields | odd))
    older = {name: value for name, value in fields.items() if name not in ("pictures", "shows")}
    assert [t.pictures for t in unpack_group(wire.pack(older)).trajectories] == [(), (), (), ()]


def test_a_picture_behind_the_first_answer_is_given_with_the_last_turn_alone(
    engine: tuple[TorchEngine, Tokenizer],
) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    asked = [*talk, {"role": "user", "content": f"{PICTURE}is"}]
    prompt = Prompt(index=0, messages=asked, answer="r", pictures=(RED,))
    assert given_trajectory(engine[1], prompt, "last", 0, 96).pictures == (RED,)
    with pytest.raises(TextError, match="set rollout.given.turns=last"):
        given_trajectory(engine[1], prompt, "all", 0, 96)


@pytest.mark.parametrize(
    ("shows", "pictures", "chat"), [("row", 4, True), ("own", 5, False), ("own", 5, True), ("nothing", 0, False)]
)
def test_what_an_environment_shows_is_seen_alike_by_engine_and_trainer(
    engine: tuple[TorchEngine, Tokenizer], shows: str, pictures: int, chat: bool
) -> None:
    inbox: queue.Queue[object] = queue.Queue()
    told = {
        "environment": "tests.rollout.showing:Asking",
        "options": {"shows": shows},
        "max_turns": 3,
        "pictures": True,
    }
    leased = lease()
    if chat:
        told["environment"] = "tests.rollout.showing:AskingChat"
    else:
        leased = leased.model_copy(update={"prompt": Prompt(index=3, text=f"{PICTURE}is", pictures=(RED,))})
    maker = MultiTurn(*engine, EnvironmentConfig.model_validate(told), 96, inbox.put)
    try:
        group = made(maker, engine[0], inbox, leased)
    finally:
        maker.close()
    path = str(engine[1].path)
    model = load_model(path, "float32", torch.device("cpu")).eval()
    give_sight(model, path, "float32", torch.device("cpu"))
    trajectories = list(group.trajectories)
    check_shown(model, trajectories)
    for trajectory, values in zip(trajectories, scored(model, trajectories), strict=True):
        assert not trajectory.failure and len(trajectory.turns) == 3, trajectory.failure
        assert len(trajectory.pictures) == pictures
        said = trajectory.loss_mask == 1
        if not trajectory.greedy:
            assert np.abs(trajectory.logprobs[said] - values[said]).max() < 1e-5


def test_a_tools_result_shows_its_picture_where_it_says_so(engine: tuple[TorchEngine, Tokenizer]) -> None:
    text = engine[1]
    end = next(iter(text.stop_ids))
    asked = {"role": "assistant", "content": "r", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    found = text.observe([{"role": "tool", "content": f"is{PICTURE}r"}], True, end, asked, (RED,))
    words = text.observe([{"role": "tool", "content": "isr"}], True, end, asked)
    users = text.observe([{"role": "user", "content": f"is{PICTURE}r"}], True, end, None, (RED,))
    assert np.array_equal(found, users) and len(found) > len(words) + 2, "this template tells of no roles"


def test_an_observation_that_nobody_answers_takes_its_pictures_with_it(engine: tuple[TorchEngine, Tokenizer]) -> None:
    inbox: queue.Queue[object] = queue.Queue()
    told = {
        "environment": "tests.rollout.showing:Endless",
        "options": {"shows": "row"},
        "max_turns": 9,
        "pictures": True,
    }
    maker = MultiTurn(*engine, EnvironmentConfig.model_validate(told), 40, inbox.put)
    try:
        group = made(maker, engine[0], inbox, lease())
    finally:
        maker.close()
    path = str(engine[1].path)
    model = load_model(path, "float32", torch.device("cpu")).eval()
    give_sight(model, path, "float32", torch.device("cpu"))
    assert all(not t.failure and 1 <= len(t.turns) < 9 and t.pictures for t in group.trajectories)
    check_shown(model, list(group.trajectories))
    scored(model, list(group.trajectories))


def test_a_pictures_own_token_in_words_costs_its_trajectory(engine: tuple[TorchEngine, Tokenizer]) -> None:
    inbox: queue.Queue[object] = queue.Queue()
    told = {"environment": "tests.rollout.showing:Endless", "options": {"shows": "echo"}}
    maker = MultiTurn(*engine, EnvironmentConfig.model_validate(told), 96, inbox.put)
    leased = lease().model_copy(update={"prompt": Prompt(index=3, text=f"{PICTURE}is", pictures=(RED,))})
    try:
        group = made(maker, engine[0], inbox, leased)
    finally:
        maker.close()
    assert all("an observation cannot be used" in t.failure for t in group.trajectories)


@pytest.mark.parametrize(
    ("environment", "told", "why"),
    [
        ("Confused", True, "step says <image> 1 times, and gave 2 pictures"),
        ("Late", False, "step shows pictures, and rollout.environment.pictures is false: set it to true"),
        ("Many", False, "reset says <image> 2 times, and its task shows 1 pictures: say it once for each"),
        ("Broken", True, "step: picture 1: 10 bytes that are no picture"),
    ],
)
def test_a_picture_that_cannot_be_shown_costs_its_trajectory(
    engine: tuple[TorchEngine, Tokenizer], environment: str, told: bool, why: str
) -> None:
    inbox: queue.Queue[object] = queue.Queue()
    config = EnvironmentConfig(environment=f"tests.rollout.showing:{environment}", pictures=told)
    maker = MultiTurn(*engine, config, 96, inbox.put)
    leased = lease().model_copy(update={"prompt": Prompt(index=3, text=f"{PICTURE}is", pictures=(RED,))})
    try:
        group = made(maker, engine[0], inbox, leased)
    finally:
        maker.close()
    assert all(why in trajectory.failure for trajectory in group.trajectories)
