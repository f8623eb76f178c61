"""Scorers that are asked for some sources alone: what a group waits for, what its reward is, and what nobody judges."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocols import messages as m
from penstock.protocols.columns import Column, ColumnTable, WeightedSum
from penstock.protocols.experience import Prompt
from penstock.services.broker.config import BrokerConfig, PromptsConfig, ReplayConfig
from penstock.services.runtime.lines import read_lines
from tests.broker.test_broker import B, Peer, Stage
from tests.broker.test_filtering import said

MATH = Column(name="reward/math", scorer="reward", nullable=True, evaluated=True, sources=("math", "aime"))
CODE = Column(name="reward/code", scorer="reward", nullable=True, evaluated=True, sources=("code",))
EVERY = Column(name="reward/every", scorer="reward", nullable=True, evaluated=True)
JUDGE = Column(name="judge", scorer="judge", reads=(MATH.name, CODE.name, EVERY.name, "reward"))
SUM = WeightedSum(name="reward", terms={MATH.name: 1.0, CODE.name: 10.0, EVERY.name: 100.0})
TABLE = ColumnTable(columns=(MATH, CODE, EVERY, JUDGE), sums=(SUM,))
APART = ColumnTable(columns=(MATH, CODE), sums=(WeightedSum(name="reward", terms={MATH.name: 1.0, CODE.name: 10.0}),))
MIXED = {"type": "mix", "sources": {"math": {"type": "sort", "size": 50}, "code": {"type": "sort", "size": 50}}}

VALUES = st.sampled_from([-1.0, 0.0, 0.5, math.nan])


@given(st.lists(st.tuples(st.booleans(), VALUES, st.sampled_from([-2.0, 0.0, 1.0])), min_size=1, max_size=6))
def test_a_reward_is_the_sum_of_what_was_asked_and_of_nothing_else(terms: list[tuple[bool, float, float]]) -> None:
    columns = [
        Column(name=f"reward/f{i}", scorer="reward", nullable=True, sources=("mine",) if asked else ("other",))
        for i, (asked, _, _) in enumerate(terms)
    ]
    total = WeightedSum(name="reward", terms={f"reward/f{i}": weight for i, (_, _, weight) in enumerate(terms)})
    table = ColumnTable(columns=tuple(columns), sums=(total,))
    asked = [(value, weight) for yes, value, weight in terms if yes]
    assert table.judged("mine") == any(weight for _, weight in asked)
    if not asked:
        return
    values = {f"reward/f{i}": np.array([value], np.float32) for i, (_, value, _) in enumerate(terms)}
    found = total.of({name: values[name] for name in table.asked_terms(total, "mine")})
    np.testing.assert_allclose(found, [sum(weight * value for value, weight in asked)], rtol=1e-6)


def every(numbers: Iterable[int], values: list[float]) -> dict[int, list[float]]:
    return {number: values for number in numbers}  # noqa: C420 - nobody changes them


def begin(folder: Path, url: str, table: ColumnTable, prompts: dict[str, object], **more: object) -> Stage:
    return Stage(folder, url, columns=table, prompts=PromptsConfig.model_validate(prompts), **more)


def by_source(stage: Stage, rollout: Peer, count: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for lease in rollout.leases(count):
        rollout.finish(lease)
        found.setdefault(lease.prompt.source, []).append(lease.number)
    return found


def test_a_group_waits_for_its_own_columns_alone_and_a_broker_that_died_between_knows_which(
    tmp_path: Path, redis_url: str
) -> None:
    prompts = {"train": MIXED, "shuffle": False}
    stage = begin(tmp_path, redis_url, TABLE, prompts)
    rollout, reward = stage.rollout(), stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=100))
    numbers = by_source(stage, rollout, 2 * B)
    assert {source: len(of) for source, of in numbers.items()} == {"math": B, "code": B}
    wanted: dict[int, set[str]] = {}
    while len(wanted) < 2 * B:
        for item in reward.next(m.Work).items:
            wanted[item.number] = set(item.wanted)
    assert all(wanted[number] == {MATH.name, EVERY.name} for number in numbers["math"])
    assert all(wanted[number] == {CODE.name, EVERY.name} for number in numbers["code"])
    said(reward, MATH, every(numbers["math"], [0.0, 1.0]))
    said(reward, CODE, every(range(2 * B), [9.0, 9.0]) | every(numbers["code"], [1.0, math.nan]))
    stage.close()

    stage = begin(tmp_path, redis_url, TABLE, prompts)
    reward, judge = stage.peer("reward", "reward-0", "2"), stage.peer("judge", "judge-0")
    for peer in (reward, judge):
        peer.box.tell(m.Credit(total=100))
    assert {name for item in reward.next(m.Work).items for name in item.wanted} == {EVERY.name}
    said(reward, EVERY, {number: [1.0, 2.0] for number in numbers["math"]})
    given_to_judge = {item.number: item for item in judge.next(m.Work).items}
    while len(given_to_judge) < B:
        given_to_judge |= {item.number: item for item in judge.next(m.Work).items}
    assert given_to_judge.keys() == {*numbers["math"]}
    assert all(i.columns.keys() == {MATH.name, EVERY.name, "reward"} for i in given_to_judge.values())
    said(judge, JUDGE, every(numbers["math"], [0.5, 0.5]))
    said(reward, EVERY, {number: [0.0, 0.0] for number in numbers["code"]})
    stage.close()
    drops = {row["group"]: row["kind"] for row in read_lines(tmp_path / "dropped.jsonl")}
    assert drops == dict.fromkeys(numbers["code"], "reward")  # a function that was asked and fails still costs it

    stage = begin(tmp_path, redis_url, TABLE, prompts)
    batch = stage.peer("trainer", "trainer", "2").box.ask(m.Take(step=0), 5)
    assert {group.number for group in batch.groups} == {*numbers["math"]}
    for group in batch.groups:
        assert group.columns.keys() == {MATH.name, EVERY.name, "judge", "reward"}
        assert group.columns["reward"].tolist() == [100.0, 201.0]
    stage.close()


class ReadOnce:
    """A data set on a disk that is gone once each row was read."""

    def __init__(self) -> None:
        self._read: set[int] = set()

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Prompt:
        if index in self._read:
            raise OSError("stale file handle")
        self._read.add(index)
        return Prompt(index=index, text=f"{index}=", source="math")


ONCE = {"train": {"type": "custom", "function": "tests.broker.test_sources:ReadOnce"}, "shuffle": False}
ALL = ColumnTable(columns=(EVERY,), sums=(WeightedSum(name="reward", terms={EVERY.name: 100.0}),))
SOME = ColumnTable(columns=(MATH, EVERY), sums=(WeightedSum(name="reward", terms={MATH.name: 1.0, EVERY.name: 100.0}),))


@pytest.mark.parametrize("before", [None, SOME, ALL])
def test_a_groups_source_is_that_of_its_experience_and_no_row_is_read_again(
    tmp_path: Path, redis_url: str, before: ColumnTable | None
) -> None:
    """Also where the run asked nothing by source when the group was finished."""
    stage = begin(tmp_path, redis_url, before or SOME, ONCE)
    numbers = by_source(stage, stage.rollout(), 2 * B)
    if before:
        stage.close()
        stage = begin(tmp_path, redis_url, SOME, ONCE)
    reward = stage.peer("reward", "reward-0", "2")
    said(reward, EVERY, every(numbers["math"], [0.0, 1.0]))
    said(reward, MATH, every(numbers["math"], [0.5, 0.5]))
    batch = stage.peer("trainer", "trainer", "3").box.ask(m.Take(step=0), 5)
    assert [group.columns["reward"].tolist() for group in batch.groups] == [[0.5, 100.5]] * B
    stage.close()


def test_what_nobody_judges_any_more_is_dropped_when_it_is_finished(tmp_path: Path, redis_url: str) -> None:
    stage = begin(tmp_path, redis_url, APART, ONCE)
    leases = stage.rollout().leases(2 * B)
    stage.close()
    code = ColumnTable(columns=(CODE,), sums=(WeightedSum(name="reward", terms={CODE.name: 1.0}),))
    stage = begin(tmp_path, redis_url, code, ONCE)
    rollout = stage.rollout(incarnation="2", credit=0)
    for lease in leases:
        assert rollout.finish(lease) == m.Ack()
    stage.close()
    drops = read_lines(tmp_path / "dropped.jsonl")
    assert [row["group"] for row in drops] == [*range(2 * B)]
    assert all("source 'math'" in row["reason"] for row in drops)


def test_a_prompt_that_nobody_judges_costs_itself_and_an_evaluation_set_is_a_source(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Prompt(index=i, text=f"{i}=", source=("math", "poems")[i % 2]) for i in range(50)]
    monkeypatch.setattr("tests.broker.test_sources.rows", lambda: rows, raising=False)
    sort = {"type": "sort", "size": 2}
    prompts = {
        "train": {"type": "custom", "function": "tests.broker.test_sources:rows"}, "shuffle": False,
        "eval": {"aime": sort, "haiku": sort}, "eval_size": 2,
    }  # fmt: skip
    stage = begin(tmp_path, redis_url, APART, prompts, broker=BrokerConfig(dead_after_s=20, heartbeat_s=0.2))
    rollout, reward = stage.rollout(), stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=100))
    held_out = rollout.leases(2)
    assert all((lease.purpose, lease.source) == ("eval", "aime") for lease in held_out)
    for lease in held_out:
        rollout.finish(lease)
    items: list[m.WorkItem] = []
    while len(items) < 2:
        items += reward.next(m.Work).items
    assert [item.wanted for item in items] == [[MATH.name]] * 2
    scores = [m.Score(purpose="eval", number=i.number, values=np.ones(1, np.float32)) for i in items]
    reward.box.ask(m.Scores(column=MATH.name, scores=scores), 5)
    assert {lease.prompt.source for lease in rollout.leases(B)} == {"math"}
    stage.close()
    assert read_lines(tmp_path / "metrics.jsonl")[0]["sets"] == {"aime": 1.0}
    drops = read_lines(tmp_path / "dropped.jsonl")
    assert drops and all(row["kind"] == "prompt" and "source 'poems'" in row["reason"] for row in drops)


@pytest.mark.parametrize("weighed", [(), (EVERY.name,)])
def test_what_is_only_read_judges_nobody_but_where_the_advantage_weighs_it(
    tmp_path: Path, redis_url: str, weighed: tuple[str, ...]
) -> None:
    terms = {CODE.name: 1.0, EVERY.name: 0.0}
    table = ColumnTable(columns=(CODE, EVERY), sums=(WeightedSum(name="reward", terms=terms, weighed=weighed),))
    stage = begin(tmp_path, redis_url, table, {"train": MIXED, "shuffle": False})
    numbers = by_source(stage, stage.rollout(), B)
    stage.close()
    assert numbers.keys() == ({"math", "code"} if weighed else {"code"})
    drops = read_lines(tmp_path / "dropped.jsonl")
    assert bool(drops) != bool(weighed) and all("source 'math'" in row["reason"] for row in drops)


def test_a_filter_leaves_alone_what_has_not_its_column(tmp_path: Path, redis_url: str) -> None:
    replay = ReplayConfig.model_validate({"filter": {"type": "range", "column": MATH.name}})
    stage = begin(tmp_path, redis_url, APART, {"train": MIXED, "shuffle": False}, replay=replay)
    rollout, reward = stage.rollout(), stage.peer("reward", "reward-0")
    numbers = by_source(stage, rollout, 2 * B)
    for column, source in ((MATH, "math"), (CODE, "code")):
        said(reward, column, every(numbers[source], [1.0, 1.0]))
    stage.close()
    assert {row["group"] for row in read_lines(tmp_path / "dropped.jsonl")} == {*numbers["math"]}
