"""`reward_shape`: what policy and critic see of a reward, wherever it lies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.services.learning.config import ConstraintConfig, Penalties, RewardShape
from penstock.services.learning.token_rewards import token_rewards
from penstock.services.trainer.algorithm_config import AlgorithmConfig
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.trainer.rank_program import a_model
from tests.trainer.steps import a_step

numbers = st.floats(-3, 3)


@settings(deadline=None)
@given(shift=numbers, scale=st.floats(0.1, 5), low=st.none() | st.floats(-2, 0), high=st.none() | st.floats(0.1, 2))
def test_the_whole_is_shaped_and_what_lies_on_tokens_adds_up_to_it(
    shift: float, scale: float, low: float | None, high: float | None
) -> None:
    step, rows = a_step(1), np.arange(12)
    shape = RewardShape(shift=shift, scale=scale, low=low, high=high)
    found = token_rewards(step, rows, Penalties(shape=shape), {})
    wanted = (step.rewards.astype(np.float64) + shift) * scale
    wanted = wanted.clip(-np.inf if low is None else low, np.inf if high is None else high)
    np.testing.assert_allclose(found.scores.numpy(), wanted, atol=1e-9)
    np.testing.assert_allclose(found.tokens.sum(-1).numpy(), wanted, atol=1e-9)
    assert not found.tokens[found.mask == 0].any()
    if shape.changes:
        assert found.metrics["reward_shaped"] == pytest.approx(wanted.mean())


def test_rewards_of_single_tokens_are_scaled_where_they_lie() -> None:
    step = a_step(1)
    step = replace(step, placed=[np.where(t.loss_mask == 1, 0.25, 0).astype(np.float32) for t in step.trajectories])
    plain, found = (
        token_rewards(step, np.arange(12), Penalties(shape=shape), {})
        for shape in (RewardShape(), RewardShape(shift=1.0, scale=2.0))
    )
    last = (plain.mask.cumsum(-1) == plain.mask.sum(-1, keepdim=True)) & plain.mask.bool()
    assert (plain.tokens != 0).sum() > 12
    torch.testing.assert_close(found.tokens[~last], 2 * plain.tokens[~last])
    torch.testing.assert_close(found.tokens[last], 2 * plain.tokens[last] + 2.0)


def test_costs_are_taken_off_what_is_left_and_metrics_have_the_reward_as_it_is() -> None:
    step = a_step(1)
    step.values["cost"] = np.ones(12, np.float32)
    limit = (ConstraintConfig(column="cost", limit=0.5, initial=0.1),)
    found = token_rewards(step, np.arange(12), Penalties(constraints=limit, shape=RewardShape(scale=2.0)), {})
    np.testing.assert_allclose(found.scores.numpy(), (2 * step.rewards.astype(np.float64) - 0.1) / 1.1, atol=1e-9)
    config = TrainerConfig.model_validate({"algorithm": {"reward_shape": {"shift": 5.0, "high": 5.5}}})
    metrics = Learner(a_model(), config, 1.0).train(a_step(1))
    assert metrics["reward"] == pytest.approx(float(a_step(1).rewards.mean())) and 5 < metrics["reward_shaped"] <= 5.5


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ({"reward_shape": {"low": 1.0, "high": 1.0}}, "low=1 is not below high=1"),
        ({"reward_shape": {"scale": 0}}, "greater than 0"),
        ({"reward_shape": {"shift": -0.5}, "preset": "maxrl"}, "reward_shape: it lowers the reward, and"),
        ({"reward_shape": {"shift": 1}, "preset": "distillation"}, "advantage=distillation does not read the reward"),
    ],
)  # fmt: skip
def test_a_shape_that_nothing_reads_or_that_makes_all_equal_is_told(chosen: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        AlgorithmConfig.model_validate(chosen)
