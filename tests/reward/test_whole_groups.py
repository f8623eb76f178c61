"""Reward functions that see all answers to a prompt at once, in their real worker processes."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.protocols.experience import Group, Prompt, Trajectory
from penstock.services.reward.config import RewardConfig
from penstock.services.reward.service import Reward
from penstock.services.runtime.scorer import ScoringTask

HERE = "tests.reward.functions"
PLAIN = Prompt(index=0, text="say", truth="a")
CHAT = Prompt(
    index=0, messages=[{"role": "user", "content": "say"}], truth={"prompt": "say", "answer": "a", "level": 1}
)


def group(answers: list[str], pictures: Sequence[tuple[bytes, ...]], prompt: Prompt = PLAIN) -> Group:
    said = [
        Trajectory(
            np.array([5, 6], np.int32), np.array([0, 1], np.uint8), np.zeros(2, np.float32),
            np.array([-1, 0], np.int32), text=text, finish="stop", pictures=shown,
        )
        for text, shown in zip(answers, pictures or [()] * len(answers), strict=True)
    ]  # fmt: skip
    return Group(1, prompt, said)


def scored(
    function: str, answers: list[str], pictures: Sequence[tuple[bytes, ...]] = (), prompt: Prompt = PLAIN, **more: Any
) -> tuple[np.ndarray, list[str]]:
    config = RewardConfig.model_validate(
        {"functions": [{"function": f"{HERE}:{function}", "whole_group": True, **more}]}
    )
    reward = Reward(config, workers=2, group_size=len(answers))
    (column,) = (each.column for each in config.functions)
    told: queue.Queue[Any] = queue.Queue()
    try:
        reward.score(
            [ScoringTask(("train", 1), group(answers, pictures, prompt), (column,), {}, 0)],
            lambda task, name, values, errors=(): told.put((values, errors)),
        )
        return told.get(timeout=30)
    finally:
        reward.close()


def test_it_is_given_lists_and_returns_a_number_for_each() -> None:
    values, errors = scored("rarest", ["a", "b", "a", "", "c"])
    assert values[[0, 1, 2, 4]].tolist() == [0.5, 1.0, 0.5, 1.0] and np.isnan(values[3])
    assert len(errors) == 1 and "no reward for this answer" in errors[0]


def test_it_may_see_what_each_was_shown_by_its_prompt_or_by_an_environment() -> None:
    values, errors = scored("as_many_as_seen", ["a", "b"], [(b"one",), (b"one", b"two")])
    assert values.tolist() == [1.0, 2.0] and not errors


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("too_few", "returned 2 numbers for 3 answers"),
        ("one_number", "returned float, not a list of numbers"),
        ("by_number", "returned dict, not a list of numbers"),
    ],
)
def test_what_is_no_list_of_as_many_costs_the_whole_group(function: str, why: str) -> None:
    values, errors = scored(function, ["a", "b", "c"])
    assert np.isnan(values).all() and len(errors) == 3 and why in errors[0]


@pytest.mark.parametrize(
    ("function", "why"),
    [("one_wrong", "returned str, not a number"), ("one_large", "returned int that no float holds")],
)
def test_what_is_wrong_with_one_number_costs_one_answer(function: str, why: str) -> None:
    values, errors = scored(function, ["a", "b", "c"])
    assert values[[0, 2]].tolist() == [1.0, 1.0] and np.isnan(values[1])
    assert len(errors) == 1 and why in errors[0]


def test_one_that_is_written_for_trl_is_called_as_there() -> None:
    values, errors = scored("of_trl", ["a", "", "b"], prompt=CHAT)
    assert values[[0, 2]].tolist() == [1.0, 0.0] and np.isnan(values[1])
    assert len(errors) == 1 and "its sources, with prompts.train.source_key" in errors[0]
    values, errors = scored("of_trl_plain", ["a", "b"], options={"bonus": 0.5})
    assert values.tolist() == [1.5, 0.5] and not errors
    _, errors = scored("of_trl", ["a"])
    assert "it asks for answer, and the truth of its row has no columns; prompts.train.truth_key=null" in errors[0]
