"""Prompts that show pictures, made into groups: what each trajectory shows arrives with it, and nothing else does."""

from __future__ import annotations

import dataclasses
import queue
import time
from typing import Any

import pytest
import torch

from penstock.protocols.experience import PICTURE, ExperienceError, Group, Prompt, Sampling
from penstock.protocols.messages import Lease
from penstock.protocols.packed_groups import pack_group, unpack_group
from penstock.services.environments.config import EnvironmentConfig
from penstock.services.modeling.load import load_config, load_model
from penstock.services.rollout.config import GivenConfig, TorchEngineConfig
from penstock.services.rollout.engines.torch.engine import TorchEngine
from penstock.services.rollout.multi_turn import MultiTurn
from penstock.services.rollout.single_turn import SingleTurn
from penstock.services.turns.given import given_trajectory
from penstock.services.turns.tokenizer import TextError, Tokenizer
from tests import seeing

RED = seeing.picture(seeing.COLOURS["r"])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[TorchEngine, Tokenizer]:
    folder = tmp_path_factory.mktemp("model")
    seeing.write("qwen2_5_vl", folder)
    text, path = Tokenizer(str(folder)), str(folder)
    made = TorchEngine(
        TorchEngineConfig(max_sequences=8, max_length=96), load_config(path), "float32", {1},
        lambda ids: text.decode([ids])[0], path=path,
    )  # fmt: skip
    model = load_model(path, "float32", torch.device("cpu"))
    made.swap(made.prepare({name: weight.detach() for name, weight in model.named_parameters()}), 0)
    return made, text


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
    assert all(t.pictures == (RED,) for t in group.trajectories) and not engine[0]._pictures
    with pytest.raises(ExperienceError, match="shows those of its prompt"):
        pack_group(Group(0, group.prompt.model_copy(update={"pictures": (b"another",)}), group.trajectories))
    blind = dataclasses.replace(group.trajectories[0], pictures=())
    again = unpack_group(pack_group(Group(0, group.prompt, [blind, group.trajectories[1]])))
    assert [t.pictures for t in again.trajectories] == [(), (RED,)]


def test_a_picture_behind_the_first_answer_is_given_with_the_last_turn_alone(
    engine: tuple[TorchEngine, Tokenizer],
) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    asked = [*talk, {"role": "user", "content": f"{PICTURE}is"}]
    prompt = Prompt(index=0, messages=asked, answer="r", pictures=(RED,))
    assert given_trajectory(engine[1], prompt, "last", 0, 96).pictures == (RED,)
    with pytest.raises(TextError, match="set rollout.given.turns=last"):
        given_trajectory(engine[1], prompt, "all", 0, 96)


class Renaming:
    """Asks in words of its own."""

    def __init__(self, shows: bool = True) -> None:
        self._shows = shows

    def reset(self, prompt: Prompt) -> str:
        return f"see {PICTURE}" if self._shows else "see nothing"

    def step(self, answer: str) -> Any:
        import penstock

        return penstock.Turn(observation="again ", reward=0.5, done=False)


@pytest.mark.parametrize("shows", [True, False])
def test_what_an_environment_asks_shows_the_pictures_that_it_has_a_place_for(
    engine: tuple[TorchEngine, Tokenizer], shows: bool
) -> None:
    inbox: queue.Queue[object] = queue.Queue()
    told = {"environment": "tests.rollout.test_seeing:Renaming", "options": {"shows": shows}, "max_turns": 2}
    maker = MultiTurn(*engine, EnvironmentConfig.model_validate(told), 96, inbox.put)
    try:
        group = made(maker, engine[0], inbox, lease())
    finally:
        maker.close()
    pad = load_config(str(engine[1]._path)).image_token_id
    for trajectory in group.trajectories:
        assert not trajectory.failure and len(trajectory.turns) == 2
        assert trajectory.pictures == ((RED,) if shows else ())
        assert ((trajectory.tokens == pad) & (trajectory.loss_mask == 0)).any() == shows
