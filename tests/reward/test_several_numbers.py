"""Reward functions that return several numbers, in their real worker processes."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from penstock.pipeline.config import load
from penstock.services.reward.config import RewardConfig
from penstock.services.reward.service import Reward
from penstock.services.runtime.scorer import ScoringTask
from tests.reward.test_whole_groups import HERE, group

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
Answers = dict[str, tuple[np.ndarray, list[str]]]
ALSO = {"clear": 0.2, "cited": 0.0}


def scored(answers: list[str], wanted: int | None = None, **function: Any) -> Answers:
    """What each column was answered; the first ``wanted`` of them are asked for, null: all."""
    config = RewardConfig.model_validate({"functions": [{"name": "judge", **function}]})
    reward = Reward(config, workers=2, group_size=len(answers))
    columns = list(config.functions[0].terms)[:wanted]
    told: queue.Queue[Any] = queue.Queue()
    try:
        reward.score(
            [ScoringTask(("train", 1), group(answers, ()), tuple(columns), {}, 0)],
            lambda task, name, values, errors=(): told.put((name, (values, list(errors)))),
        )
        found = dict(told.get(timeout=30) for _ in columns)
        assert told.empty()
        return found
    finally:
        reward.close()


def test_each_number_is_a_column() -> None:
    found = scored(["a", "bbb"], function=f"{HERE}:several", also=ALSO)
    assert {name: values.tolist() for name, (values, _) in found.items()} == {
        "reward/judge": [1.0, 3.0],
        "reward/judge.clear": [0.5, 0.5],
        "reward/judge.cited": [1.0, 1.0],
    }
    assert not any(errors for _, errors in found.values())


def test_only_what_is_wanted_is_answered() -> None:
    assert list(scored(["a"], 2, function=f"{HERE}:several", also=ALSO)) == ["reward/judge", "reward/judge.clear"]


def test_what_also_does_not_name_is_not_read() -> None:
    ((values, errors),) = scored(["aa"], function=f"{HERE}:as_verl_returns").values()
    assert values.tolist() == [2.0] and not errors


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("lacks", "returned a dict without 'cited'"),
        ("number", "returned float, not a dict with score, clear, cited"),
        ("words", "returned str, not a number for 'clear'"),
    ],
)
def test_what_is_missing_costs_its_own_trajectory(answer: str, why: str) -> None:
    for values, errors in scored(["a", answer], function=f"{HERE}:several", also=ALSO).values():
        assert np.isfinite(values[0]) and np.isnan(values[1])
        assert len(errors) == 1 and why in errors[0]


def test_of_a_whole_group_each_answer_has_several() -> None:
    found = scored(["a", "bb"], function=f"{HERE}:rubric_of_group", also=ALSO, whole_group=True)
    assert found["reward/judge"][0].tolist() == [1.0, 2.0] and found["reward/judge.clear"][0].tolist() == [0.0, 1.0]


def test_their_weights_make_the_reward() -> None:
    functions = "[{function: 'mine:judge', also: {clear: 0.2, cited: 0}}, {function: exact_match}]"
    config = load(QUICKSTART, [f"reward.functions={functions}"])
    (total,) = config.columns.sums
    assert total.terms == {"reward/judge": 1.0, "reward/judge.clear": 0.2, "reward/exact_match": 1.0}


@pytest.mark.parametrize(
    ("functions", "why"),
    [
        ([{"function": "environment", "also": {"x": 1}}], "what an environment gave is one number"),
        ([{"function": "m:a", "also": {"b": 1}}, {"function": "m:c", "name": "a.b"}], "two functions write"),
        ([{"function": "m:a", "also": {"b c": 1}}], "should match pattern"),
        ([{"function": "regex", "last_turn": True, "own_words": True}], "the response is one of them; take one out"),
    ],
)
def test_names_and_turns_that_cannot_be(functions: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        RewardConfig.model_validate({"functions": functions})
