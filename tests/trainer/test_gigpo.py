"""GiGPO's advantages beside its paper's equations, turn by turn, and the states that it compares turns by."""

from __future__ import annotations

from collections import defaultdict
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocols.experience import UNSAMPLED, Trajectory
from penstock.services.trainer.algorithms.advantages.gigpo import gigpo
from penstock.services.trainer.algorithms.advantages.grpo import grpo
from penstock.services.trainer.turn_states import turn_states
from penstock.services.turns.answers import Answer
from penstock.services.turns.joining import Again, join

Told = tuple[str, int, float]
"""A turn: what it answers, how many tokens it has, and what it earned."""
episodes = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.sampled_from([0.0, 0.5, 1.0])), max_size=4),
    min_size=1,
    max_size=6,
)


def a_trajectory(turns: list[Told]) -> Trajectory:
    tokens, sampled = [1], [0]
    for told, size, _ in turns:
        tokens += [ord(told)] + [2] * size
        sampled += [0] + [1] * size
    column = np.array(sampled, np.uint8)
    versions = np.where(column == 1, 0, UNSAMPLED).astype(np.int32)
    return Trajectory(np.array(tokens, np.int32), column, np.zeros(len(tokens), np.float32), versions, "", "stop")


def of_one(trajectory: Trajectory) -> np.ndarray:
    return turn_states([trajectory], np.zeros(1, np.int64))[0]


def tables(rows: list[list[Told]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards, each turn's on its last token; mask; states."""
    made = [a_trajectory(turns) for turns in rows]
    width = max(len(t.tokens) for t in made)
    rewards, mask, states = (np.zeros((len(rows), width)) for _ in range(3))
    states = states.astype(np.int64)
    for row, (turns, trajectory) in enumerate(zip(rows, made, strict=True)):
        size = len(trajectory.tokens)
        mask[row, :size], states[row, :size] = trajectory.loss_mask, of_one(trajectory)
        place = 0
        for _, length, earned in turns:
            place += 1 + length
            rewards[row, place] = earned
    return torch.from_numpy(rewards), torch.from_numpy(mask), torch.from_numpy(states)


def relative(value: float, among: list[float], std: bool, alone: float) -> float:
    if len(among) == 1:
        return alone
    return (value - mean(among)) / (stdev(among) + 1e-6 if std else 1.0)


@settings(max_examples=60, deadline=None)
@given(rows=episodes, gamma=st.sampled_from([0.5, 1.0]), weight=st.sampled_from([0.0, 2.0]), std=st.booleans())
def test_advantages_are_the_papers(rows: list[list[Told]], gamma: float, weight: float, std: bool) -> None:
    groups = [row // 3 for row in range(len(rows))]
    returns = [[sum(gamma**j * t[2] for j, t in enumerate(turns[k:])) for k in range(len(turns))] for turns in rows]
    same: dict[tuple[int, str], list[float]] = defaultdict(list)
    for row, turns in enumerate(rows):
        for k, (told, *_) in enumerate(turns):
            same[groups[row], told if k else f"the first, {told}"].append(returns[row][k])
    whole: dict[int, list[float]] = defaultdict(list)
    for row, turns in enumerate(rows):
        whole[groups[row]].append(sum(t[2] for t in turns))
    rewards, mask, states = tables(rows)
    wanted = torch.zeros_like(rewards)
    for row, turns in enumerate(rows):
        total = sum(t[2] for t in turns)
        place = 1
        for k, (told, size, _) in enumerate(turns):
            of_turn = relative(returns[row][k], same[groups[row], told if k else f"the first, {told}"], std, alone=0.0)
            of_row = relative(total, whole[groups[row]], std, alone=total / (1 + 1e-6 if std else 1))
            wanted[row, place + 1 : place + 1 + size] = of_row + weight * of_turn
            place += 1 + size
    scores, alone = rewards.sum(-1), torch.arange(len(rows))
    found = gigpo(rewards, mask, torch.tensor(groups), states, scores, alone, gamma=gamma, turn_weight=weight, std=std)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_without_the_turns_part_it_is_grpos() -> None:
    rewards, mask, states = tables([[("a", 2, 0.5), ("b", 1, 0.0)], [("a", 1, 1.0)], [("a", 3, 0.0)]])
    groups = torch.zeros(3, dtype=torch.long)
    scores = rewards.sum(-1)
    found = gigpo(rewards, mask, groups, states, scores, torch.arange(3), turn_weight=0.0)
    torch.testing.assert_close(found, grpo(rewards.sum(-1), mask, groups))


def test_a_turn_is_told_by_what_it_answers_alone() -> None:
    """Not by what was said before, nor by where it stands."""
    short, long = a_trajectory([("a", 1, 0), ("b", 2, 0)]), a_trajectory([("c", 3, 0), ("a", 1, 0), ("b", 1, 0)])
    assert of_one(short)[-1] == of_one(long)[-1]
    assert of_one(short)[2] != of_one(long)[2], "the first answers its prompt"
    for trajectory in (short, long):
        states = of_one(trajectory)
        assert (states[trajectory.loss_mask == 0] == 0).all() and (states[trajectory.loss_mask == 1] != 0).all()
        turns = np.split(states, np.flatnonzero(np.diff(trajectory.loss_mask.astype(int))) + 1)
        assert all(len(set(turn.tolist())) == 1 for turn in turns)


@pytest.mark.parametrize("sampled", [[0, 0], [1, 1, 1], [0, 1, 0]])
def test_turns_may_lie_anywhere(sampled: list[int]) -> None:
    column = np.array(sampled, np.uint8)
    versions = np.where(column == 1, 0, UNSAMPLED).astype(np.int32)
    size = len(column)
    made = Trajectory(np.arange(size, dtype=np.int32), column, np.zeros(size, np.float32), versions, "", "stop")
    assert (of_one(made) != 0).tolist() == [bool(each) for each in sampled]


def test_a_session_is_compared_once_and_its_branches_meet_where_they_part() -> None:
    """Two answers to the same observation, in two rows, the second of which has the first turn from the other one."""

    def said(*tokens: int) -> Answer:
        return Answer(np.array(tokens, np.int32), np.full(len(tokens), -1, np.float32), np.zeros(len(tokens), np.int32))

    prompt, observation, first = np.array([1, 2], np.int32), np.array([7], np.int32), said(10, 11)
    rows = [
        join([prompt, first, observation, said(20)], "", "stop", turns=("", "")),
        join([prompt, Again(first), observation, said(21)], "", "stop", turns=("", "")),
        join([prompt, said(12, 13), observation, said(22)], "", "stop", turns=("", "")),
    ]
    states = turn_states(rows, np.array([0, 0, 1]))
    assert states[0][-1] == states[1][-1] == states[2][-1] and not states[1][2:4].any()
    scores, groups = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    mask = torch.tensor(np.array([row.loss_mask for row in rows])).double()
    tables = torch.zeros_like(mask)
    tables[:, -1] = scores
    sessions = torch.tensor([0, 0, 1])
    found = gigpo(tables, mask, groups, torch.tensor(np.array(states)), scores, sessions, std=False, gamma=1.0)
    turn = torch.tensor([1 / 3, 1 / 3, -2 / 3], dtype=torch.float64)
    torch.testing.assert_close(found[:, -1], torch.tensor([0.5, 0.5, -0.5], dtype=torch.float64) + turn)
    assert found[1, 2:4].tolist() == [0, 0] and found[0, 2] == found[0, 3] == 0.5 + 0.5


def test_an_answer_without_a_token_counts_in_its_groups_mean() -> None:
    scores, mask = torch.tensor([1.0, 1.0, -1.0]), torch.tensor([[1.0], [1.0], [0.0]])
    groups, states = torch.zeros(3, dtype=torch.long), torch.zeros(3, 1, dtype=torch.long)
    found = gigpo(scores[:, None] * mask, mask, groups, states, scores, torch.arange(3), turn_weight=0.0)
    torch.testing.assert_close(found, grpo(scores, mask, groups))
