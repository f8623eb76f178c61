"""The answers of a group that the policy learns from: PODS' theorem, PF-PPO's ends, and a step of these alone."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.config import ConfigError, load
from penstock.services.trainer.algorithm_config import SubsetConfig
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from penstock.services.trainer.subset import chosen, subset_of
from tests.trainer.rank_program import a_model
from tests.trainer.steps import a_step


@given(st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]), min_size=2, max_size=8), st.integers(2, 8))
def test_no_other_answers_differ_more(rewards: list[float], keep: int) -> None:
    values = np.array(rewards)
    found = chosen(values, SubsetConfig(keep=keep), 0)
    assert len(found) == min(keep, len(values)) == len(set(found.tolist()))
    most = max(values[list(some)].var() for some in combinations(range(len(values)), len(found)))
    assert values[found].var() == pytest.approx(most)


def test_the_best_stay_with_the_worst_or_with_any() -> None:
    values = np.array([0.3, 0.9, 0.1, 0.8, 0.2, 0.7])
    assert chosen(values, SubsetConfig(keep=3, by="best_worst"), 0).tolist() == [1, 2, 3]
    drawn = [tuple(chosen(values, SubsetConfig(keep=3, by="best_random"), seed)) for seed in range(60)]
    assert all({1, 3} < set(places) for places in drawn)
    assert {*drawn} == {tuple(sorted({1, 3, other})) for other in (0, 2, 4, 5)}


def a_learner(**algorithm: Any) -> Learner:
    config = {"algorithm": {"kl": {"coefficient": 0.0}, **algorithm}, "optimizer": {"lr": 1e-2}}
    return Learner(a_model(), TrainerConfig.model_validate(config), 1.0)


@pytest.mark.parametrize("by", ["max_variance", "best_worst", "best_random"])
def test_the_policy_learns_as_if_there_were_no_others(by: str) -> None:
    subset = {"keep": 2, "by": by}
    step = a_step(0)
    step.values["reward"][3] = np.nan  # its call failed: it is not among those that are chosen from
    kept = subset_of(step, SubsetConfig.model_validate(subset))
    assert kept[3] and not kept.all()
    alone, others = a_learner(), a_learner(subset=subset)
    wanted, found = alone.train(step.only(np.flatnonzero(kept))), others.train(step)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5) and wanted["grad_norm"]
    for theirs, mine in zip(alone.parameters.values(), others.parameters.values(), strict=True):
        torch.testing.assert_close(theirs, mine)
    assert found["tokens"] > wanted["tokens"], "metrics are of all"
    assert others.flops.total < a_learner_flops(step)


def a_learner_flops(step: Any) -> float:
    every = a_learner()
    every.train(step)
    return every.flops.total


def test_an_agents_session_counts_once() -> None:
    step = a_step(0)
    group = np.flatnonzero(step.groups == step.groups[0])
    step.sessions[group] = [0, 0, *range(1, len(group) - 1)]
    step.sessions[group[-1] + 1 :] += len(group)
    step.sessions[:] = np.unique(step.sessions, return_inverse=True)[1]
    step.values["reward"][group] = [1.0, 1.0, *np.linspace(0.2, 0.0, len(group) - 2)]
    kept = subset_of(step, SubsetConfig(keep=2, by="best_worst"))[group]
    assert kept.tolist() == [True, True, *[False] * (len(group) - 3), True]


def test_as_many_as_there_are_leave_nobody_out() -> None:
    with pytest.raises(ConfigError, match=r"subset\.keep=8: a group has 8 sampled answers.*rollout\.sampling\.n"):
        load(Path("configs/quickstart.yaml"), ["trainer.algorithm.subset={keep: 8}"])
