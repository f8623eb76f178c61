"""What a taken batch becomes: where rewards lie, and what is compared with but not trained on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocols.columns import REWARD, Column, ColumnTable, WeightedSum
from penstock.protocols.experience import Group, Prompt, as_bytes
from penstock.protocols.messages import Batch, TakenGroup
from penstock.protocols.packed_groups import lengths_of, pack_group
from penstock.services.learning.batch import TrainingBatch, open_batch
from penstock.services.learning.config import Penalties
from penstock.services.learning.token_rewards import token_rewards
from penstock.services.trainer.described import describe
from tests.conftest import make_group

TABLE = ColumnTable(
    columns=(
        Column(name="reward/exact", scorer="reward", nullable=True),
        Column(name="reward/environment", scorer="reward", per="token", nullable=True),
    ),
    sums=(WeightedSum(name=REWARD, terms={"reward/exact": 2.0, "reward/environment": 0.5}),),
)


def opened(seed: int, greedy_failed: bool = False, with_greedy: bool = True) -> TrainingBatch:
    random = np.random.default_rng(seed)
    taken = []
    for number in range(3):
        group = make_group(random, number)
        last = dataclasses.replace(group.trajectories[-1], greedy=with_greedy)
        group = Group(number, group.prompt, [*group.trajectories[:-1], last])
        data = pack_group(group)
        lengths = lengths_of(as_bytes(data))
        assert lengths.tolist() == [len(t.tokens) for t in group.trajectories]
        mask = np.concatenate([t.loss_mask for t in group.trajectories])
        tokens = (random.random(int(lengths.sum())) * mask).astype(np.float32)
        exact = random.random(4).astype(np.float32)
        parts = np.split(tokens, np.cumsum(lengths)[:-1])
        reward = (2 * exact + 0.5 * np.array([part.sum() for part in parts])).astype(np.float32)
        if greedy_failed and number == 1:
            reward[-1] = np.nan
        columns = {"reward/exact": exact, "reward/environment": tokens, REWARD: reward}
        taken.append(TakenGroup(number=number, experience=as_bytes(data), columns=columns))
    return open_batch(Batch(step=0, seed=0, max_lag=2, groups=taken, committed=0), TABLE)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_parts_of_a_reward_lie_where_their_column_says_and_the_rest_on_the_last_token(seed: int) -> None:
    step = opened(seed, with_greedy=False)
    rows = np.arange(len(step.trajectories))
    found = token_rewards(step, rows, Penalties(), {})
    torch.testing.assert_close(found.tokens.sum(-1), found.scores, atol=1e-5, rtol=1e-5)
    assert not found.tokens[found.mask == 0].any()
    for i, trajectory in enumerate(step.trajectories):
        last = int(np.flatnonzero(trajectory.loss_mask)[-1])
        given_there = 0.5 * step.token_values["reward/environment"][i]
        np.testing.assert_allclose(found.tokens[i, :last], given_there[:last], atol=1e-6)
        rest = float(found.tokens[i, last]) - float(given_there[last])
        np.testing.assert_allclose(rest, 2 * step.values["reward/exact"][i], atol=1e-4)


def test_greedy_answers_are_compared_with_and_not_trained_on() -> None:
    step = opened(1)
    assert len(step.trajectories) == 9 and not any(t.greedy for t in step.trajectories)
    assert step.greedy is not None and step.greedy.shape == (9,) and np.isfinite(step.greedy).all()
    assert all(len(set(step.greedy[step.groups == number].tolist())) == 1 for number in range(3))
    assert step.rewarded.all() and len(step.token_values["reward/environment"]) == 9
    assert step.placed is not None and len(step.placed) == 9


def test_whose_greedy_answer_has_no_reward_is_not_trained_on() -> None:
    step = opened(1, greedy_failed=True)
    assert step.rewarded.tolist() == [True] * 3 + [False] * 3 + [True] * 3


def test_what_a_source_is_not_asked_for_is_no_number_and_lies_nowhere() -> None:
    sources = {"reward/exact": ("math",), "reward/environment": ("game",)}
    columns = tuple(column.model_copy(update={"sources": sources[column.name]}) for column in TABLE.columns)
    random, taken = np.random.default_rng(0), []
    for number, source in enumerate(("math", "game")):
        made = make_group(random, number)
        group = Group(number, made.prompt.model_copy(update={"source": source}), made.trajectories)
        size = sum(len(t.tokens) for t in group.trajectories)
        asked = {"reward/exact": np.ones(4, np.float32)} if source == "math" else {}
        asked |= {"reward/environment": np.ones(size, np.float32)} if source == "game" else {}
        rewards = {REWARD: np.full(4, number + 1, np.float32)}
        taken.append(TakenGroup(number=number, experience=as_bytes(pack_group(group)), columns=asked | rewards))
    batch = Batch(step=0, seed=0, max_lag=2, groups=taken, committed=0)
    step = open_batch(batch, ColumnTable(columns=columns, sums=TABLE.sums))
    assert step.values["reward/exact"].tolist()[:4] == [1.0] * 4 and np.isnan(step.values["reward/exact"][4:]).all()
    assert np.isnan(np.concatenate(step.token_values["reward/environment"][:4])).all()
    assert step.placed is not None and not np.concatenate(step.placed[:4]).any()
    assert all((part == 0.5).all() for part in step.placed[4:])
    found = describe(step, 0, True)
    lengths = [len(t.tokens) for t in step.trajectories[4:]]
    assert found["reward/exact"] == 1.0 and found["reward/environment"] == np.mean(lengths)
    assert found["source/math"] == 1.0 and found["source/game"] == 2.0
    lacking = batch.model_copy(update={"groups": [taken[0].model_copy(update={"columns": rewards}), taken[1]]})
    assert open_batch(lacking, ColumnTable(columns=columns, sums=TABLE.sums)).unreadable == 1


NAN = float("nan")


@pytest.mark.parametrize(
    ("rewards", "solved_all", "solved_none"),
    [
        ([[1, 1], [0, 0], [0, 1], [NAN, NAN]], 1 / 3, 1 / 3),
        ([[0, 0], [0, 0]], 0, 1),
        ([[1, 1], [1, 1]], 1, 0),
        ([[1, 1], [-1, -1], [-1, 1], [1, NAN]], 0.5, 0.25),
        ([[0.1, 0.1], [1.1, 0.1], [1.1, 1.1]], 1 / 3, 1 / 3),  # the form alone earns 0.1
    ],
)
def test_groups_of_equal_rewards_are_solved_or_stuck(
    rewards: list[list[float]], solved_all: float, solved_none: float
) -> None:
    random, n = np.random.default_rng(0), len(rewards)
    trajectories = [t for number in range(n) for t in make_group(random, number, 2).trajectories]
    numbers = np.repeat(np.arange(n), 2)
    step = TrainingBatch(trajectories, numbers, np.arange(2 * n), {REWARD: np.array(rewards, np.float32).ravel()}, {})
    found = describe(step, 0, compares=True)
    assert (found["solved_all"], found["solved_none"]) == (pytest.approx(solved_all), pytest.approx(solved_none))
    groups = np.isfinite(rewards).any(1).sum()
    assert found["groups_without_variance"] == pytest.approx((solved_all + solved_none) * groups)
    assert "solved_all" not in describe(step, 0, compares=False), "each answer is learned from alone"


def test_what_is_solved_is_told_by_the_best_of_its_own_source() -> None:
    random = np.random.default_rng(0)
    groups = [make_group(random, number, 2) for number in range(3)]
    prompts = [Prompt(index=0, text="p", truth="t", source=name) for name in ("math", "game", "game") for _ in range(2)]
    rewards = {REWARD: np.array([1, 1, 10, 10, 3, 3], np.float32)}
    numbers = np.repeat(np.arange(3), 2)
    trajectories = [t for group in groups for t in group.trajectories]
    step = TrainingBatch(trajectories, numbers, np.arange(6), rewards, {}, prompts=tuple(prompts))
    found = describe(step, 0, compares=True)
    assert (found["solved_all"], found["solved_none"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
