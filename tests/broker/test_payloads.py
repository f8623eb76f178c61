"""What the broker holds of groups is what it was given, whatever of it is in memory, in Redis, or on its way there."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.protocols.columns import Column, ColumnTable, WeightedSum
from penstock.services.broker import payloads as module
from penstock.services.broker.config import StoreConfig
from penstock.services.broker.payloads import Payloads
from penstock.services.broker.store import Store, StoreError

TABLE = ColumnTable(
    columns=(
        Column(name="reward/a", scorer="reward"),
        Column(name="reward/b", scorer="reward"),
        Column(name="surprise", scorer="surprise", per="token"),
    ),
    sums=(WeightedSum(name="reward", terms={"reward/a": 1.0, "reward/b": 0.5}),),
)


def make(url: str) -> tuple[Store, Payloads]:
    store = Store(url, "test", StoreConfig(retry_s=2))
    return store, Payloads(store, TABLE)


def column(value: float) -> np.ndarray:
    return np.full(2, value, np.float32)


def test_columns_that_come_to_a_broker_that_was_started_again_are_not_lost(redis_url: str) -> None:
    store, payloads = make(redis_url)
    payloads.begin(("train", 0), b"experience")
    payloads.add(("train", 0), "reward/a", column(1))
    store.commit()
    store, payloads = make(redis_url)  # killed, started again: nothing is in memory
    payloads.add(("train", 0), "reward/b", column(2))
    found = payloads.columns(("train", 0), ["reward/a", "reward/b"])  # in the same turn, before it is durable
    payloads.add(("train", 0), "reward", TABLE.sums[0].of(found))
    payloads.add(("train", 0), "surprise", np.zeros(3, np.float32))
    (taken,) = payloads.taken([0], TABLE.names)
    store.commit()
    payloads.settled()
    payloads.forget(("train", 0))
    (again,) = payloads.taken([0], TABLE.names)
    for group in (taken, again):
        assert group.experience.tobytes() == b"experience"
        assert {name: values.tolist() for name, values in group.columns.items()} == {
            "reward/a": [1, 1], "reward/b": [2, 2], "reward": [2, 2], "surprise": [0, 0, 0]
        }  # fmt: skip


def test_what_is_let_go_of_in_the_turn_that_wrote_it_is_there_until_it_is_durable(redis_url: str) -> None:
    store, payloads = make(redis_url)
    payloads.begin(("train", 0), b"experience")
    store.commit()
    payloads.settled()
    for name in TABLE.names:
        payloads.add(("train", 0), name, column(1))
    payloads.forget(("train", 0))  # the trainer was given it, and a critic that was started again asks for it too
    (group,) = payloads.taken([0], TABLE.names)
    assert group.columns.keys() == set(TABLE.names)
    store.commit()
    payloads.settled()
    assert not payloads._held


def test_what_this_turn_has_queued_stays_in_memory_however_much_there_is(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 100)
    store, payloads = make(redis_url)
    for number in range(5):
        payloads.begin(("train", number), bytes(90))
        payloads.begin(("eval", number), bytes(50))
    assert [payloads.experience(("train", number)).size for number in range(5)] == [90] * 5
    store.commit()
    payloads.settled()
    payloads.begin(("train", 5), bytes(90))
    assert len(payloads._held) == 6  # the evaluation's, which are nowhere else, and this one
    assert [payloads.experience(("train", number)).size for number in range(5)] == [90] * 5


def test_a_step_that_was_taken_with_other_columns_says_what_to_do(redis_url: str) -> None:
    _, payloads = make(redis_url)
    payloads.begin(("train", 0), b"experience")
    payloads.add(("train", 0), "reward/a", column(1))
    with pytest.raises(StoreError, match="had no column reward/b, surprise, reward: go on with the config"):
        payloads.taken([0], TABLE.names)
    with pytest.raises(StoreError, match="the store has lost group 7"):
        payloads.taken([7], TABLE.names)


def test_which_groups_lack_a_column_is_known_without_reading_them(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, payloads = make(redis_url)
    for number in range(3):
        payloads.begin(("train", number), b"experience")
    payloads.add(("train", 1), "reward", column(1))
    store.commit()
    store, payloads = make(redis_url)
    monkeypatch.setattr(store, "payloads", lambda *_: pytest.fail("it reads them"))
    assert payloads.lacking([0, 1, 2], "reward") == [0, 2] and payloads.lacking([], "reward") == []
