"""Tokens of the user's that end answers: how such an answer is finished, and learned, in training and evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest

from penstock.protocols.experience import Group, Prompt, Sampling
from penstock.protocols.messages import Lease
from penstock.services.rollout.config import RolloutConfig, SamplingConfig
from penstock.services.rollout.single_turn import SingleTurn
from tests.engines.workbench import LETTERS, Workbench, make_models

OWN = 1
"""The model's end."""
MORE = tuple(range(3, 300, 20))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    folder = tmp_path_factory.mktemp("model")
    options = {"type": "torch", "max_length": 96, "max_sequences": 16, "device": "cpu"}
    made = Workbench(folder, make_models(folder), options, SamplingConfig(stop_token_ids=MORE))
    made.publish(0)
    yield made
    made.engine.close()


def answered(bench: Workbench, purpose: Literal["train", "eval"], sampling: Sampling) -> Group:
    maker = SingleTurn(bench.engine, bench.text, max_length=96)
    prompt = Prompt(index=0, text=LETTERS[7])
    maker.start(Lease(purpose=purpose, number=1, attempt=1, seed=3, prompt=prompt, sampling=sampling))
    made = [found for completion in bench.drain() if (found := maker.take(completion))]
    assert len(made) == 1 and isinstance(made[0][1], Group)
    return made[0][1]


@pytest.mark.parametrize("purpose", ["train", "eval"])
def test_an_answer_ends_with_one_of_them_and_it_is_learned(bench: Workbench, purpose: Literal["train", "eval"]) -> None:
    sampling = SamplingConfig(n=16, max_new_tokens=60, stop_token_ids=MORE).training()
    found = answered(bench, purpose, sampling).trajectories
    mine = [each for each in found if each.tokens[-1] in MORE]
    assert mine, "one of 15 tokens of 300 comes soon"
    for each in found:
        said = each.tokens[each.loss_mask == 1]
        assert not np.isin(said[:-1], [OWN, *MORE]).any()
        assert (each.finish == "stop") == (each.tokens[-1] in (OWN, *MORE))
    for each in mine:
        assert each.loss_mask[-1] == 1 and each.logprobs[-1] < 0
        wanted = bench.engine.score(bench.engine.prepare(dict(bench.models[0].named_parameters())), each.tokens)
        sampled = each.loss_mask[1:] == 1
        np.testing.assert_allclose(each.logprobs[1:][sampled], wanted[sampled], atol=2e-4)


def test_they_are_the_engines_and_no_message_says_them() -> None:
    config = RolloutConfig(sampling=SamplingConfig(stop_token_ids=MORE, stop=("x",)))
    plain = config.sampling.model_copy(update={"stop_token_ids": ()})
    assert config.sampling.training() == plain.training() and config.sampling.greedy() == plain.greedy()


def test_a_token_is_a_number_from_0_on() -> None:
    with pytest.raises(ValueError, match="stop_token_ids"):
        SamplingConfig(stop_token_ids=(-1,))
