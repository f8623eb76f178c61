"""A trajectory that has failed has no reward, whoever gives the reward: no function is called for it."""

from __future__ import annotations

import queue
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.protocols.experience import ALONE, Group, Prompt, Trajectory, no_rewards
from penstock.services.gateway.session import Session
from penstock.services.reward.config import RewardConfig
from penstock.services.reward.service import Reward
from penstock.services.runtime.scorer import ScoringTask

HERE = "tests.reward.functions"
LATE, BROKEN = "step timed out after 30 s", "reset raised KeyError"


def trajectory(failure: str = "", sampled: int = 2) -> Trajectory:
    mask = np.array([0] * 3 + [1] * sampled, np.uint8)
    size = len(mask)
    return Trajectory(
        np.arange(size, dtype=np.int32), mask, np.zeros(size, np.float32), np.where(mask, 0, -1).astype(np.int32),
        text="a", turns=("a",) * bool(sampled), rewards=np.zeros(size, np.float32), failure=failure,
    )  # fmt: skip


def scored(trajectories: list[Trajectory], **function: Any) -> tuple[np.ndarray, list[str], dict[str, float]]:
    reward = Reward(RewardConfig.model_validate({"functions": [function]}), workers=1, group_size=len(trajectories))
    column = RewardConfig.model_validate({"functions": [function]}).functions[0].column
    group = Group(1, Prompt(index=0, text="say", truth="a"), trajectories)
    told: queue.Queue[Any] = queue.Queue()
    try:
        reward.score(
            [ScoringTask(("train", 1), group, (column,), {}, 0)],
            lambda task, name, values, errors=(): told.put((values, list(errors))),
        )
        values, errors = told.get(timeout=30)
        return values, errors, reward.gauges()
    finally:
        reward.close()


@pytest.mark.parametrize(("branches", "wanted"), [("last", [1, 1, 1, 0, 0, 1]), ("each", [0, 0, 1, 1, 0, 1])])
@pytest.mark.parametrize("whole_group", [False, True])
def test_a_session_is_judged_where_it_came_to_however_it_got_there(
    branches: str, wanted: list[int], whole_group: bool
) -> None:
    """One that hands over, or shortens its history, has branches that end in a call or a summary: no answers."""
    said = [("hm", 0), ("hm", 0), ("a", 0), ("a", 1), ("b", 1), ("a", ALONE)]
    made = [replace(trajectory(), text=text, turns=(text,), session=session) for text, session in said]
    function = {"function": f"{HERE}:are_a"} if whole_group else {"function": "exact_match"}
    values, errors, _ = scored(made, **function, whole_group=whole_group, branches=branches)
    assert values.tolist() == wanted and not errors


@pytest.mark.parametrize("function", [{"function": f"{HERE}:last_turn"}, {"function": "environment"}])
def test_what_has_failed_is_not_judged_and_says_why(function: dict[str, Any]) -> None:
    values, errors, gauges = scored([trajectory(), trajectory(LATE), trajectory(BROKEN, 0)], **function)
    name = function["function"].rpartition(":")[2]
    assert sorted(errors) == sorted([f"{name} {LATE}", f"{name} {BROKEN}"])
    if name == "last_turn":
        assert values[0] == 1.0 and np.isnan(values[1:]).all()
        assert (gauges["calls_failed/reward/last_turn"], gauges["calls_timed_out/reward/last_turn"]) == (2, 1)
    else:
        assert np.flatnonzero(np.isnan(values)).tolist() == [9, 12], "the last token of each"


def test_where_nothing_was_played_an_environment_gave_nothing() -> None:
    values, errors, _ = scored([replace(trajectory(), rewards=no_rewards()), trajectory()], function="environment")
    assert not errors and not values[: len(trajectory().tokens)].any() and len(values) == 2 * len(trajectory().tokens)


def test_one_that_compares_answers_is_not_shown_it() -> None:
    function = {"function": f"{HERE}:as_many", "whole_group": True}
    values, errors, _ = scored([trajectory(LATE), trajectory(), trajectory()], **function)
    assert np.isnan(values[0]) and values[1:].tolist() == [2.0, 2.0] and errors == [f"as_many {LATE}"]
    values, errors, _ = scored([trajectory(LATE), trajectory(BROKEN)], **function)
    assert np.isnan(values).all() and len(errors) == 2


def test_an_agents_session_that_was_given_out_too_often_has_no_reward() -> None:
    session = Session(0, failure="given out 3 times: nothing was heard of its client")
    made = session.trajectories(lambda ids: "", np.arange(4, dtype=np.int32), False)
    values, errors, _ = scored(made, function=f"{HERE}:constant")
    assert np.isnan(values).all() and errors == ["constant given out 3 times: nothing was heard of its client"]
