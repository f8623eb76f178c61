"""Branches of an agent's session: its group compares it once, however many it has."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from penstock.protocols.experience import Group, mean_by_session, sessions_of
from penstock.protocols.packed_groups import pack_group, unpack_group
from penstock.services.trainer.algorithm_config import AlgorithmConfig
from penstock.services.trainer.algorithms.compose import Algorithm
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.conftest import make_group
from tests.trainer.rank_program import a_model
from tests.trainer.steps import a_step, gradient

WHOLE_ROWS: list[Any] = [
    "grpo", {"type": "grpo", "std": False}, "rloo", "opo", "gpg", "maxrl", "reinforce_plus_plus_baseline",
    {"type": "grpo_passk"},
]  # fmt: skip


@pytest.mark.parametrize("advantage", WHOLE_ROWS, ids=str)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_a_session_cut_into_branches_has_the_advantage_that_it_had_whole(advantage: Any, seed: int) -> None:
    choice = {"type": advantage} if isinstance(advantage, str) else advantage
    algorithm = Algorithm(TypeAdapter(AlgorithmConfig).validate_python({"advantage": choice}))
    random = np.random.default_rng(seed)
    branches = random.integers(1, 4, 8)
    lengths = [random.integers(1, 5, count) for count in branches]
    scores = torch.from_numpy(random.integers(0, 2, 8).astype(np.float64))
    groups = torch.arange(8) // 4
    whole = torch.arange(16)[None] < torch.tensor([int(each.sum()) for each in lengths])[:, None]
    expected = algorithm.advantages(scores, whole, groups, {})

    sessions = torch.from_numpy(np.repeat(np.arange(8), branches))
    cut = torch.arange(16)[None] < torch.from_numpy(np.concatenate(lengths))[:, None]
    order = torch.from_numpy(random.permutation(len(sessions)))
    sessions, cut = sessions[order], cut[order]
    found = algorithm.advantages(scores[sessions], cut, groups[sessions], {}, None, sessions)
    torch.testing.assert_close(found, expected[sessions, :1] * cut, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("budget", [64, 100_000])
def test_a_mean_over_sequences_counts_a_session_once(aggregation: str, budget: int) -> None:
    """Or one of many branches would weigh as much as many sessions, and a group's pulls would not add up to 0."""
    config = {
        "algorithm": {"loss": {"type": "reinforce"}, "aggregation": aggregation},
        "tokens_per_micro_batch": budget,
    }
    one, plain = (Learner(a_model(), TrainerConfig.model_validate(config), 1.0) for _ in range(2))
    step = dataclasses.replace(a_step(0), sessions=np.array([0, 0, 0, *range(1, 10)]))
    advantages = one._advantages(step)[0]
    found, _ = one.accumulate(step, None, advantages)
    total = torch.zeros(())
    for session in range(10):
        losses = []
        for row in np.flatnonzero(step.sessions == session):
            ids = torch.from_numpy(step.trajectories[row].tokens.astype(np.int64))
            logs = plain.model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
            mask = torch.from_numpy(step.trajectories[row].loss_mask[1:] == 1)
            losses.append((-advantages[row, 1 : len(ids)] * logs)[mask])
        of_session = torch.cat(losses)
        total = total + (of_session.mean() if aggregation == "seq-mean-token-mean" else of_session.sum())
    (total / 10).backward()
    assert found == pytest.approx(float(total.detach()) / 10, abs=1e-5)
    for mine, its in zip(gradient(one), gradient(plain), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-5, rtol=1e-3)


def test_what_a_group_says_of_its_sessions_survives_packing() -> None:
    group = make_group(np.random.default_rng(0), 3, 4)
    places = [0, 0, 2, -1]
    told = [
        dataclasses.replace(t, session=place, metrics={"calls": float(place)})
        for t, place in zip(group.trajectories, places, strict=True)
    ]
    again = unpack_group(pack_group(Group(3, group.prompt, told)))
    assert [t.session for t in again.trajectories] == places and again.trajectories[2].metrics == {"calls": 2.0}
    sessions = sessions_of([trajectory.session for trajectory in again.trajectories])
    assert sessions.tolist() == [0, 0, 1, 2]
    means = mean_by_session(np.array([1.0, np.nan, np.nan, 3.0]), sessions)
    assert means[0] == 1.0 and np.isnan(means[1]) and means[2] == 3.0
