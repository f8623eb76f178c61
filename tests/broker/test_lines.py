"""A line that breaks while broker and actor live on: what was on its way is lost, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.protocols import messages as m
from penstock.protocols.versions import Digests, SnapshotRoute
from penstock.services.runtime.actor import Actor, ActorContext
from penstock.services.runtime.outbox import Outbox
from tests.broker.test_broker import Stage
from tests.protocols.breakable_line import BreakableLine
from tests.weights.channel import until

LIMIT = 2


@pytest.fixture
def stage(tmp_path: Path, redis_url: str) -> Iterator[Stage]:
    made = Stage(tmp_path, redis_url)
    yield made
    made.close()


def joined(line: BreakableLine, stage: Stage, kind: str, version: int) -> Actor:
    actor = Actor(kind, ActorContext(f"{kind}-0" if kind == "rollout" else kind, "test", stage.folder, line.address))
    actor.version, actor.digest = version, f"digest-{version}"
    actor.join()
    return actor


def test_a_rollout_whose_credit_was_lost_is_given_work_all_the_same(stage: Stage) -> None:
    stage.load(stage.peer("rollout", "rollout-9"), 0)
    line = BreakableLine(stage.broker.address, word=b"Credit")
    actor = joined(line, stage, "rollout", 0)
    outbox, leases = Outbox(actor, lambda: LIMIT), list[m.Lease]()
    outbox.joined()

    def both() -> bool:
        event = actor.mailbox.inbox.get(timeout=10)
        if isinstance(event, m.HelloNeeded):
            outbox.forgotten()
            outbox.forgotten()  # as where two were said before either was heard
        elif isinstance(event, m.Lease):
            leases.append(event)
        return len(leases) == LIMIT

    until(both, 10, "the leases that there is room for")
    assert line.cuts == 1
    for lease in leases:  # both are done with: there is as much room again
        actor.put_down("train", lease.number)
        outbox.dismiss()
    leases.clear()
    until(both, 10, "as many again")
    actor.leave("over")
    line.close()


@pytest.mark.parametrize("word", [b"Propose", b"CommitVersion"])
def test_a_version_that_was_lost_with_a_line_is_offered_again_at_once(stage: Stage, word: bytes) -> None:
    """And not once the trainer's deadline is over; what was answered is not."""
    stage.load(stage.peer("rollout", "rollout-9"), 0)
    line = BreakableLine(stage.broker.address, word=word, back=True)
    rollout = joined(line, stage, "rollout", 0)
    here, heard = [rollout.mailbox.identity], list[object]()
    offer = m.Propose(
        targets=here, epoch=7, version=1, layout="layout", route=SnapshotRoute(), snapshots="tcp://127.0.0.1:1"
    )
    whole = Digests(buckets=(), whole="digest-1")
    for said in (offer, m.CommitVersion(targets=here, epoch=7, version=1, digests=whole)):
        assert stage.trainer.box.ask(said, 5).absent == []

    def hears(kind: type[m.Message]) -> bool:
        heard.append(rollout.mailbox.inbox.get(timeout=10))
        return isinstance(heard[-1], kind)

    until(lambda: hears(m.CommitVersion), 10, "the version")
    assert line.cuts == 1 and any(isinstance(each, m.Propose) and each.version == 1 for each in heard)
    loaded = m.Loaded(epoch=7, version=1, digest=whole.whole, transport="snapshot")
    rollout.mailbox.ask(loaded, 5)
    heard.clear()
    line.cut()
    until(lambda: hears(m.HelloNeeded), 10, "a hello by another line")
    rollout.mailbox.ask(loaded, 5)  # what the broker says of the hello comes before its answer
    while not rollout.mailbox.inbox.empty():
        heard.append(rollout.mailbox.inbox.get())
    assert not [each for each in heard if isinstance(each, m.Propose | m.CommitVersion)]
    rollout.leave("over")
    line.close()


def test_a_trainer_hears_again_of_the_rollouts_that_came_meanwhile(stage: Stage) -> None:
    line = BreakableLine(stage.broker.address)
    trainer = joined(line, stage, "trainer", 0)
    until(lambda: isinstance(trainer.mailbox.inbox.get(timeout=10), m.Receivers), 10, "the first word of who is here")
    line.cut()
    stage.peer("rollout", "rollout-0")

    def told() -> bool:
        event = trainer.mailbox.inbox.get(timeout=10)
        return isinstance(event, m.Receivers) and len(event.serves) == 1

    until(told, 10, "the rollout")
    trainer.leave("over")
    line.close()
