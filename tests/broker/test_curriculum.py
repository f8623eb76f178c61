"""Which prompts are asked, by what came of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocols.experience import Prompt
from penstock.services.broker.config import RangeFilter
from penstock.services.broker.rules.curriculum import TABLE, Bounds, Curriculum
from penstock.services.broker.rules.filtering import why_filtered
from penstock.services.data.prompts import PromptStream

SIZE = 6


class Kept(dict[str, dict[Any, dict[str, Any]]]):
    """A journal in memory."""

    def rows(self, table: str) -> dict[str, dict[str, Any]]:
        return {str(key): row for key, row in self.get(table, {}).items()}

    def put(self, table: str, key: Any, row: dict[str, Any]) -> None:
        self.setdefault(table, {})[key] = row

    def delete(self, table: str, key: Any) -> None:
        self[table].pop(key, None)


def stream() -> PromptStream:
    return PromptStream([Prompt(index=i, text=f"{i}") for i in range(SIZE)], 3, True, None)


def test_where_all_rest_nobody_looks_again_at_each_draw() -> None:
    prompts, looked = stream(), list[int]()

    def row_of(draw: int) -> int:
        looked.append(draw)
        return prompts.row(draw)

    curriculum = Curriculum(Kept(), Bounds(0.0, 1.0, 9, 9), SIZE, row_of)
    for draw in range(SIZE):
        curriculum.measured(draw, 0.0)
    looked.clear()
    assert [curriculum.next(draw) for draw in range(SIZE, 2 * SIZE)] == list(range(SIZE, 2 * SIZE))
    assert len(looked) <= 3 * SIZE
    curriculum.measured(2 * SIZE + 1, 0.5)  # this one is asked again
    woken = prompts.row(2 * SIZE + 1)
    assert prompts.row(curriculum.next(2 * SIZE)) == woken


def test_what_rests_wakes_when_it_would_have_though_the_data_has_grown() -> None:
    kept, bounds, rows = Kept(), Bounds(0.0, 1.0, 2, 2), stream()
    Curriculum(kept, bounds, SIZE, rows.row).measured(20 * SIZE, 0.0)  # it rests in epochs 21 and 22
    row = rows.row(20 * SIZE)
    larger = Curriculum(kept, bounds, 3 * SIZE, lambda draw: row)
    begins = next(draw for draw in range(20 * SIZE, 40 * SIZE) if larger.next(draw) == draw)
    assert 22 * SIZE <= begins <= 26 * SIZE, "as near to it as the larger epochs allow"


@given(
    worth=st.lists(st.sampled_from([0.0, 0.05, 0.5, 0.95, 1.0]), min_size=SIZE, max_size=SIZE),
    rest_hard=st.integers(0, 3),
    rest_easy=st.integers(0, 3),
    died_after=st.integers(0, 30),
)
def test_what_was_too_easy_or_too_hard_rests_and_comes_back(
    worth: list[float], rest_hard: int, rest_easy: int, died_after: int
) -> None:
    bounds, prompts, kept = Bounds(0.1, 0.9, rest_hard, rest_easy), stream(), Kept()
    curriculum = Curriculum(kept, bounds, SIZE, prompts.row)
    asked: dict[int, list[int]] = {row: [] for row in range(SIZE)}
    draw = 0
    for turn in range(60):
        if turn == died_after:  # another broker takes over, with what is in the journal
            curriculum = Curriculum(kept, bounds, SIZE, prompts.row)
        draw = curriculum.next(draw)
        row = prompts.row(draw)
        asked[row].append(draw // SIZE)
        curriculum.measured(draw, worth[row])
        curriculum.measured(draw, worth[row])  # said again
        draw += 1
    last = draw // SIZE
    for row, epochs in asked.items():
        rest = bounds.rest(worth[row])
        gaps = {later - before for before, later in pairwise(epochs)}
        if any(not bounds.rest(each) for each in worth):  # else all rest at once, and some are asked all the same
            assert gaps <= {rest + 1}, (row, epochs)
            assert epochs[0] == 0 and epochs[-1] >= last - 2 * (rest + 1)
    assert all(bounds.rest(worth[int(row)]) for row in kept.rows(TABLE))


@pytest.mark.parametrize("right", [1, 5, 9])
def test_what_the_filter_leaves_out_by_the_same_bounds_rests(right: int) -> None:
    rewards = np.array([1] * right + [0] * (10 - right), np.float32)
    left_out = why_filtered(RangeFilter(low=0.1, high=0.9), rewards)
    for mean in (np.nanmean(rewards), np.nanmean(rewards, dtype=np.float64)):
        assert bool(Bounds(0.1, 0.9, 1, 1).rest(float(mean))) == (left_out is not None) == (right != 5)


def test_where_all_rest_the_run_goes_on() -> None:
    prompts = stream()
    curriculum = Curriculum(Kept(), Bounds(0.0, 1.0, 5, 5), SIZE, prompts.row)
    for draw in range(SIZE):
        assert curriculum.next(draw) == draw
        curriculum.measured(draw, 1.0)
    assert curriculum.next(SIZE) == SIZE and curriculum.counts() == {"prompts_resting": SIZE}
    assert not Curriculum(Kept(), None, SIZE, prompts.row).counts()
