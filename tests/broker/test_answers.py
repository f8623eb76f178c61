"""Which of a step's answers trackers are shown, and how."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocols.experience import as_bytes
from penstock.protocols.messages import TakenGroup
from penstock.protocols.packed_groups import pack_group
from penstock.services.broker.samples import LETTERS, answers
from tests.conftest import make_group


def taken(number: int, n: int, text: str = "abc", greedy: bool = False, by_token: bool = False) -> TakenGroup:
    """A group whose answer k has the reward k, of which the first has none."""
    group = make_group(np.random.default_rng(number), number, n, versions=(3, 4))
    group.trajectories[:] = [replace(t, text=f"{k}{text}") for k, t in enumerate(group.trajectories)]
    if greedy:
        group.trajectories[-1] = replace(group.trajectories[-1], greedy=True)
    rewards = np.arange(n, dtype=np.float32)
    rewards[0] = np.nan
    parts = 2 * rewards
    if by_token:
        parts = np.concatenate([np.full(len(t.tokens), k, np.float32) for k, t in enumerate(group.trajectories)])
    size = sum(len(t.tokens) for t in group.trajectories)
    columns = {"reward": rewards, "reward/exact": parts, "reference": np.zeros(size, np.float32)}
    return TakenGroup(number=number, experience=as_bytes(pack_group(group)), columns=columns)


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), count=st.integers(1, 12))
def test_one_of_each_group_comes_before_a_second_of_any(sizes: list[int], count: int) -> None:
    groups = [taken(number, n) for number, n in enumerate(sizes)]
    found = answers(5, groups[:count], ("reward/exact",), {"reference"}, count)
    assert found.columns == (
        "step", "group", "prompt", "response", "reward", "reward/exact", "finish", "tokens", "lag",
    )  # fmt: skip
    assert len(found.rows) == min(count, sum(sizes[:count]))
    seen = Counter(row[1] for row in found.rows)
    rounds = [int(row[3][0]) for row in found.rows]
    assert rounds == sorted(rounds) and len({(row[1], row[3]) for row in found.rows}) == len(found.rows)
    for number, times in seen.items():
        assert all(times >= min(sizes[number], other - 1) for other in seen.values())
    for row in found.rows:
        assert [*map(type, row)] == [int, int, str, str, float, float, str, int, int]
        assert row[0] == 5 and row[8] in (1, 2), "as many versions as its oldest token is behind the step"
        reward = float(row[3][0]) if row[3][0] != "0" else float("nan")
        np.testing.assert_equal(row[4:6], (reward, 2 * reward))


def test_long_texts_are_cut_with_a_mark_and_rewards_by_token_are_summed() -> None:
    (row,) = answers(5, [taken(0, 1, "x" * 5000)], (), (), 1).rows
    assert row[3] == "0" + "x" * (LETTERS - 1) + " … [905 more characters]"
    groups = [taken(1, 3, by_token=True, greedy=True)]
    rows = answers(5, groups, ("reward/exact",), {"reward/exact", "reference"}, 9).rows
    assert len(rows) == 2, "a greedy answer is not trained on"
    assert rows[1][5] == rows[1][5] // 1 > 0 and rows[0][5] == 0.0


def test_a_reward_that_is_not_asked_of_a_groups_source_is_no_number() -> None:
    group = taken(1, 2)
    del group.columns["reward/exact"]
    rows = answers(5, [group], ("reward/exact", "reward/other"), {"reward/other"}, 2).rows
    assert [*map(type, rows[0])] == [int, int, str, str, float, float, float, str, int, int]
    np.testing.assert_equal(rows[1][4:7], (1.0, float("nan"), float("nan")))


def test_a_group_that_cannot_be_read_is_left_out() -> None:
    broken = TakenGroup(number=0, experience=as_bytes(b"nothing"), columns={"reward": np.zeros(2, np.float32)})
    assert [row[1] for row in answers(0, [broken, taken(1, 2)], (), (), 3).rows] == [1, 1]
    assert not answers(0, [broken], (), (), 3).rows
