"""Which groups are left out before anything is learned from them: the rule beside its own words, and in a broker."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.protocols import messages as m
from penstock.protocols.columns import Column, ColumnTable, WeightedSum
from penstock.services.broker.config import ColumnFilter, RangeFilter, ReplayConfig, VarianceFilter
from penstock.services.broker.rules.filtering import Verdict, why_filtered
from penstock.services.broker.rules.gate import Gate
from penstock.services.broker.rules.groups import GroupTracker
from penstock.services.rollout.config import SamplingConfig
from penstock.services.runtime.lines import read_lines
from tests.broker.machine import COLUMNS, Memory
from tests.broker.test_broker import B, Peer, Stage, trained

EXACT = Column(name="reward/exact", scorer="reward", nullable=True)
OVERLONG = Column(name="reward/overlong", scorer="reward", nullable=True)
KEEP = Column(name="reward/keep", scorer="reward", nullable=True)
SUM = WeightedSum(name="reward", terms={EXACT.name: 1.0, OVERLONG.name: 1.0})
DAPO = ColumnTable(columns=(EXACT, OVERLONG), sums=(SUM,))
WATCHED = ColumnTable(columns=(EXACT, OVERLONG, KEEP), sums=(SUM,))

MARKS = st.lists(st.sampled_from([-1.0, 0.0, 0.1, 0.25, 0.5, 1.0, math.nan]), min_size=1, max_size=9)
BOUNDS = st.sampled_from([-1.0, 0.0, 0.1, 0.25, 0.5, 1.0])


def exact(value: float) -> Fraction:
    """As the column has it: in float32."""
    return Fraction(float(np.float32(value)))


@given(MARKS, BOUNDS, BOUNDS)
def test_a_range_keeps_the_groups_whose_mean_is_strictly_inside(marks: list[float], low: float, high: float) -> None:
    assume(low < high)
    found = why_filtered(RangeFilter(low=low, high=high), np.array(marks, np.float32))
    there = [exact(mark) for mark in marks if not math.isnan(mark)]
    mean = exact(float(sum(there, Fraction()) / max(1, len(there))))
    expected = "no_value" if not there else "low" if mean <= exact(low) else "high" if mean >= exact(high) else None
    assert (found and found.why) == expected


@given(MARKS, st.sampled_from([0.0, 0.1, 0.5, 2.0]))
def test_alike_is_what_lies_no_further_apart_than_the_tolerance(marks: list[float], tolerance: float) -> None:
    found = why_filtered(VarianceFilter(tolerance=tolerance), np.array(marks, np.float32))
    there = [exact(mark) for mark in marks if not math.isnan(mark)]
    if not there:
        assert found and found.why == "no_value"
    else:
        spread = max(there) - min(there)
        assert bool(found) == (spread <= Fraction(tolerance) + Fraction(1, 10**6) * bool(tolerance))


@given(st.integers(-30, 30), st.integers(0, 3))
def test_grades_in_tenths_are_alike_wherever_they_lie(least: int, steps: int) -> None:
    marks = np.array([least / 10, (least + steps) / 10], np.float32)
    assert bool(why_filtered(VarianceFilter(tolerance=0.1), marks)) == (steps <= 1)
    assert bool(why_filtered(VarianceFilter(), marks)) == (steps == 0)


@given(MARKS)
def test_a_column_of_ones_own_keeps_what_it_marks_once(marks: list[float]) -> None:
    found = why_filtered(ColumnFilter(column="reward/keep"), np.array(marks, np.float32))
    assert (found is None) == any(mark and not math.isnan(mark) for mark in marks)


@given(st.lists(st.booleans(), min_size=2, max_size=8), st.data())
def test_dapo_asks_for_right_and_wrong_answers_whatever_their_lengths(right: list[bool], data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(-8, 0), min_size=len(right), max_size=len(right)))
    accuracy = np.array(right, np.float32)
    rule = RangeFilter(column="reward/exact")
    assert (why_filtered(rule, accuracy) is None) == (0 < sum(right) < len(right))
    if 0 < sum(right) < len(right) or len({*lengths}) == 1:
        return
    assert why_filtered(VarianceFilter(), accuracy + np.array(lengths) / 8) is None  # what the sum is blind for


def said(peer: Peer, column: Column, marks: dict[int, list[float]]) -> None:
    scores = [m.Score(purpose="train", number=n, values=np.array(v, np.float32)) for n, v in marks.items()]
    peer.box.ask(m.Scores(column=column.name, scores=scores), 5)


def begin(folder: Path, url: str, columns: ColumnTable, rule: dict[str, Any], **more: Any) -> tuple[Stage, Peer]:
    stage = Stage(folder, url, columns=columns, replay=ReplayConfig.model_validate({"filter": rule}), **more)
    reward = stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=100))
    return stage, reward


def test_accuracy_is_filtered_where_a_punishment_stands_beside_it_and_the_step_says_so(
    tmp_path: Path, redis_url: str
) -> None:
    stage, reward = begin(tmp_path, redis_url, DAPO, {"type": "range", "column": EXACT.name})
    rollout = stage.rollout()
    for lease in rollout.leases(2 * B):
        rollout.finish(lease)
    marks = {0: [1, 1], 1: [0, 1], 2: [0, 0], 3: [1, 0], 4: [0, 1], 5: [1, 0]}
    said(reward, EXACT, {n: [float(v) for v in values] for n, values in marks.items()})
    said(reward, OVERLONG, {n: [-0.5, 0.0] for n in marks})  # in the sum, no group's answers are alike
    batch = stage.trainer.box.ask(m.Take(step=0), 5)
    assert [group.number for group in batch.groups] == [1, 3, 4]
    stage.trainer.box.ask(trained(batch), 5)
    stage.close()
    drops = {row["group"]: (row["kind"], row["reason"]) for row in read_lines(tmp_path / "dropped.jsonl")}
    assert drops == {
        0: ("filtered", "filtered: the mean of its reward/exact is 1, not below 1"),
        2: ("filtered", "filtered: the mean of its reward/exact is 0, not above 0"),
    }
    row = read_lines(tmp_path / "metrics.jsonl")[-1]
    assert (row["filtered/low"], row["filtered/high"], row["groups_dropped"]) == (1, 1, 2)


def test_an_answer_without_a_reward_has_no_part_in_the_mean(tmp_path: Path, redis_url: str) -> None:
    sampling = SamplingConfig(n=3, max_new_tokens=8).training()
    rule = {"type": "range", "column": EXACT.name}
    stage, reward = begin(tmp_path, redis_url, DAPO, rule, sampling=sampling)
    rollout = stage.rollout()
    for lease in rollout.leases(2 * B):
        rollout.finish(lease)
    said(reward, EXACT, {n: [1.0, 0.0, 0.0] for n in range(2 * B)})
    nan = math.nan
    said(reward, OVERLONG, {0: [nan, 0.0, 0.0], 1: [0.0, nan, 0.0], 2: [nan, nan, 0.0], 3: [0.0, 0.0, 0.0]})
    stage.close()
    kinds = {row["group"]: row["kind"] for row in read_lines(tmp_path / "dropped.jsonl")}
    assert kinds == {0: "filtered", 2: "reward"}  # too few rewards is a failure, and comes first


@pytest.mark.parametrize("last", [KEEP, OVERLONG])
def test_a_rule_of_ones_own_holds_whichever_column_comes_last_and_whatever_dies_between(
    tmp_path: Path, redis_url: str, last: Column
) -> None:
    rule = {"type": "column", "column": KEEP.name}
    stage, reward = begin(tmp_path, redis_url, WATCHED, rule)
    rollout = stage.rollout()
    for lease in rollout.leases(2 * B):
        rollout.finish(lease)
    marks: dict[str, dict[int, list[float]]] = {
        EXACT.name: {n: [0.0, 1.0] for n in range(2 * B)},
        OVERLONG.name: {n: [0.0, -1.0] for n in range(2 * B)},
        KEEP.name: {0: [0.0, 0.0], 1: [0.0, 1.0], 2: [math.nan, 0.0], 3: [1.0, 1.0], 4: [2.0, 0.0], 5: [0.0, 0.0]},
    }
    for column in (EXACT, OVERLONG, KEEP):
        if column is not last:
            said(reward, column, marks[column.name])
    assert not (tmp_path / "dropped.jsonl").read_text()
    stage.close()
    stage, reward = begin(tmp_path, redis_url, WATCHED, rule)
    said(reward, last, marks[last.name])
    trainer = stage.peer("trainer", "trainer", "2")
    assert [group.number for group in trainer.box.ask(m.Take(step=0), 5).groups] == [1, 3, 4]
    stage.close()
    stage, _ = begin(tmp_path, redis_url, WATCHED, rule)
    state = stage.peer("observer", "o").box.ask(m.StatusRequest(), 5).state
    assert state["filtered"] == {"zero": 3} and state["dropped"] == 3  # counted once, and remembered
    stage.close()
    assert [json.loads(line)["group"] for line in (tmp_path / "dropped.jsonl").open()] == [0, 2, 5]


def test_a_group_that_is_filtered_ends_a_series_of_drops() -> None:
    groups = GroupTracker(Memory(), Gate(2, 2, 1), COLUMNS, 9, None, None, lambda _: None, lambda *_: None)
    for kept in (False, True, False, False):
        lease = groups.next_lease(0)
        assert lease
        if kept:
            groups.filter(lease.number, Verdict("equal", "all rewards are 1"))
        else:
            groups.drop(lease.number, "its prompt cannot be used", "prompt")
    assert groups.consecutive_drops == 2
