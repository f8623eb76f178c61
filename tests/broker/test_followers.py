"""A critic beside a store that is not the one it knew: it goes on with the step that the trainer goes on with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.protocols import messages as m
from penstock.protocols.columns import VALUES, Column, ColumnTable, WeightedSum
from penstock.protocols.mailbox import DeadlineError
from penstock.protocols.versions import Digests
from tests.broker.test_broker import REWARDS, B, Peer, Stage

LEARNED = Column(name=VALUES, scorer="critic", per="token", of_step=True)
TABLE = ColumnTable(columns=(REWARDS, LEARNED), sums=(WeightedSum(name="reward", terms={REWARDS.name: 1.0}),))


def digest(step: int) -> str:
    return f"{step:032x}"


@pytest.fixture
def stage(tmp_path: Path, redis_url: str) -> Iterator[Stage]:
    made = Stage(tmp_path, redis_url, columns=TABLE, learners=("trainer", "critic"), steps=50)
    yield made
    made.close()


def trained_before(stage: Stage, steps: int) -> Peer:
    """A trainer whose checkpoint is of that version; the store knows of nothing."""
    trainer = stage.peer("trainer", "trainer")
    row = [m.LedgerRow(step=s, groups=[B * s + i for i in range(B)], seed=0, max_lag=1, digest=digest(s + 1))
           for s in range(steps)]  # fmt: skip
    trainer.box.ask(m.LedgerTail(version=steps, steps=row), 5)
    whole = digest(steps)
    trainer.box.ask(
        m.CommitVersion(
            targets=[], epoch=1, version=steps, digests=Digests(buckets=(digest(9),), whole=whole)
        ), 5,
    )  # fmt: skip
    return trainer


def step_for(critic: Peer, step: int, after: list[int] | None = None, within_s: float = 5) -> m.Message:
    return critic.box.ask(m.Take(step=step, after=after or []), within_s)


def test_one_that_is_ahead_of_all_that_is_known_waits_for_the_trainer_and_goes_back(stage: Stage) -> None:
    critic = stage.peer("critic", "critic")
    with pytest.raises(DeadlineError):
        step_for(critic, 9, [27, 28, 29], 0.5)
    trained_before(stage, 2)
    assert step_for(critic, 9, [27, 28, 29]) == m.Skip(step=2)


def test_one_that_is_behind_goes_on_without_what_is_lost(stage: Stage) -> None:
    trained_before(stage, 2)
    assert step_for(stage.peer("critic", "critic"), 1) == m.Skip(step=2)


def test_one_that_has_trained_the_next_step_in_another_store_writes_its_values_in_this_one(stage: Stage) -> None:
    """The groups have the numbers that they had there: nothing else would tell them apart."""
    trainer, critic = trained_before(stage, 2), stage.peer("critic", "critic")
    rollout, scorer = stage.peer("rollout", "rollout-0"), stage.peer("reward", "reward-0")
    loaded = m.Loaded(
        epoch=1, version=2, digest=digest(2), transport="snapshot", bytes_received=0, buckets_again=0, receive_s=0,
        verify_s=0, prepare_s=0, canary=0.0,
    )  # fmt: skip
    rollout.box.ask(loaded, 5)
    rollout.box.tell(m.Credit(total=100)), scorer.box.tell(m.Credit(total=100))
    asked = trainer.box.ask_later(m.Take(step=2), 20, again=False)
    leases = rollout.leases(B)
    for lease in leases:
        rollout.finish(lease, 2)
    scorer.score(B)
    numbers = [lease.number for lease in leases]
    critic_asked = critic.box.ask_later(m.Take(step=3, after=numbers), 20, again=False)
    assert critic_asked.result(10) == m.Skip(step=2)
    batch = step_for(critic, 2)
    assert isinstance(batch, m.Batch) and [group.number for group in batch.groups] == numbers
    values = [np.zeros(2 * 4, np.float32) for _ in numbers]
    critic.box.ask(m.StepColumn(step=2, column=VALUES, values=values), 5)
    found = asked.result(10)
    assert isinstance(found, m.Batch) and found.step == 2
