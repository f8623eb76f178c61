"""Costs below a limit: the multiplier rises while they are above, every learner has the same one, and a checkpoint
too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.services.learning import checkpoint
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.config import CheckpointConfig, ConstraintConfig, Penalties
from penstock.services.learning.constraints import lagrangian, multiplier_of, risen
from penstock.services.learning.token_rewards import token_rewards
from penstock.services.trainer.algorithm_config import AlgorithmConfig
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.trainer.rank_program import a_model
from tests.trainer.steps import Tokenizer, a_step

LIMIT = {"column": "cost", "limit": 3.0, "initial": 0.5, "rate": 0.1}
NAME = "multiplier/cost"
numbers = st.floats(-100, 100)


def costly(seed: int, cost: float) -> TrainingBatch:
    step = a_step(seed)
    return replace(step, values={**step.values, "cost": np.full(len(step.trajectories), cost, np.float32)})


@given(multiplier=st.floats(1e-3, 50), cost=numbers, limit=numbers, rate=st.floats(1e-3, 1))
def test_a_multiplier_rises_where_the_cost_is_above_and_falls_where_it_is_below(
    multiplier: float, cost: float, limit: float, rate: float
) -> None:
    constraint = ConstraintConfig(column="c", limit=limit, rate=rate, largest=80.0)
    found = risen(multiplier, cost, constraint)
    assert 0 <= found <= 80.0
    assert (found - multiplier) * (cost - limit) >= -1e-6 * max(1, abs(cost - limit))


@given(scores=st.lists(numbers, min_size=1, max_size=8), one=st.floats(0, 9), two=st.floats(0, 9))
def test_costs_are_taken_off_in_proportion(scores: list[float], one: float, two: float) -> None:
    rewards = torch.tensor(scores, dtype=torch.float64)
    costs = [rewards * 2, rewards + 1]
    found, divisor = lagrangian(rewards, costs, [one, two])
    torch.testing.assert_close(found * divisor, rewards - one * costs[0] - two * costs[1])
    same, _ = lagrangian(rewards, costs, [0.0, 0.0])
    torch.testing.assert_close(same, rewards)


def test_a_cost_that_is_not_known_costs_its_trajectory_alone() -> None:
    """A group of a run that had no such constraint yet: its multiplier would be NaN for ever."""
    config = TrainerConfig.model_validate({"algorithm": {"constraints": [LIMIT]}})
    one, step = Learner(a_model(), config, 1.0), costly(0, 4.0)
    step.values["cost"][3] = np.nan
    assert one.train(step)["skipped"] == 0.0
    assert one.state[NAME] == pytest.approx(0.5 * np.exp(0.1)), "by the others' costs"
    assert one.train(costly(1, 4.0))["skipped"] == 0.0


def test_a_session_costs_what_it_does_on_average_over_its_branches() -> None:
    step, state = costly(0, 1.0), dict[str, float]()
    step.values["cost"][:9] = 10.0
    step = replace(step, sessions=np.array([0] * 9 + [1, 2, 3]))
    token_rewards(step, np.arange(12), Penalties(constraints=(ConstraintConfig.model_validate(LIMIT),)), state)
    assert state[NAME] == pytest.approx(0.5 * np.exp(0.1 * ((10 + 3) / 4 - 3.0)))


def test_all_learners_of_a_step_pay_the_same_and_what_lies_on_tokens_adds_up() -> None:
    penalties = Penalties(constraints=(ConstraintConfig.model_validate(LIMIT),))
    states: list[dict[str, float]] = [{}, {}]
    for seed, cost in enumerate((4.0, 4.0, 1.0)):
        step = costly(seed, cost)
        found = [token_rewards(step, np.arange(12), penalties, state) for state in states]
        torch.testing.assert_close(found[0].tokens, found[1].tokens)
        torch.testing.assert_close(found[0].tokens.sum(-1), found[0].scores)
        multiplier = found[0].metrics[NAME]
        wanted = (step.rewards.astype(np.float64) - multiplier * cost) / (1 + multiplier)
        np.testing.assert_allclose(found[0].scores, wanted, atol=1e-6)
    assert states[0] == states[1]
    np.testing.assert_allclose(states[0][NAME], 0.5 * np.exp(0.1 * (1 + 1 - 2)))


def test_the_multiplier_is_in_the_checkpoint(tmp_path: Path) -> None:
    def learner() -> Learner:
        config = {"algorithm": {"constraints": [LIMIT]}}
        return Learner(a_model(), TrainerConfig.model_validate(config), 1.0)

    one, again = learner(), learner()
    assert one.train(costly(0, 9.0))[NAME] == 0.5
    saver = checkpoint.Saver(one, Tokenizer(), tmp_path, CheckpointConfig(keep=1))
    path = saver.begin().result()
    saver.close()
    checkpoint.restore(again, path)
    assert again.state == one.state and one.state[NAME] > 0.5
    assert again.train(costly(1, 9.0))[NAME] == one.train(costly(1, 9.0))[NAME] > 0.5
    lower = ConstraintConfig.model_validate(LIMIT | {"initial": 0.1})
    assert multiplier_of(lower, one.state) == 0.1, "a run that is resumed with another start begins anew"


@pytest.mark.parametrize("advantage", ["gdpo", "distillation", "remax"])
@pytest.mark.parametrize("taken", ["constraints", "kl"])
def test_what_is_taken_off_a_reward_that_nobody_reads_is_refused(advantage: str, taken: str) -> None:
    chosen: dict[str, Any] = {"advantage": {"type": advantage}}
    if advantage == "gdpo":
        chosen["advantage"]["components"] = {"reward/exact_match": 1.0}
    if taken == "constraints":
        chosen["constraints"] = [{"column": "reward/length", "limit": 3}]
    else:
        chosen["kl"] = {"place": "reward", "coefficient": 0.1}
    with pytest.raises(ValidationError, match="taken off the reward"):
        AlgorithmConfig.model_validate(chosen)


def test_a_multiplier_waits_while_the_policy_stands_still() -> None:
    config = {"algorithm": {"constraints": [LIMIT]}}
    one = Learner(a_model(), TrainerConfig.model_validate(config), 1.0, frozen_steps=2)
    found = [one.train(costly(seed, 9.0))[NAME] for seed in range(4)]
    assert found[:3] == [0.5] * 3 and found[3] > 0.5
