"""A broker that takes up a run: cut short in the middle of something, replaced, or given another config."""

from __future__ import annotations

import dataclasses
import re
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from penstock.pipeline.report.findings import other_store
from penstock.protocols import messages as m
from penstock.protocols.columns import Column, ColumnTable, WeightedSum
from penstock.protocols.mailbox import AddressError, DeadlineError, Mailbox
from penstock.protocols.router_server import RouterServer
from penstock.services.broker import archive, state
from penstock.services.broker.archive import Archive
from penstock.services.broker.config import BrokerConfig, GateConfig, PromptsConfig, ReplayConfig, StoreConfig
from penstock.services.broker.rules.gate import Gate
from penstock.services.broker.rules.groups import GroupTracker
from penstock.services.broker.service import Broker
from penstock.services.broker.store import StoreError
from penstock.services.rollout.config import SamplingConfig
from tests.broker.machine import COLUMNS, Memory
from tests.broker.test_broker import REWARDS, B, N, Peer, Stage, settings
from tests.broker.test_broker import trained as commit_of
from tests.weights.channel import until

OTHER = Column(name="reward/slow", scorer="reward", nullable=True)
BOTH = ColumnTable(
    columns=(REWARDS, OTHER), sums=(WeightedSum(name="reward", terms={REWARDS.name: 1.0, OTHER.name: 1.0}),)
)


def train(stage: Stage, steps: int) -> Peer:
    """The first ``steps`` of them; returns the trainer."""
    rollout, reward = stage.rollout(), stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=1000))
    trainer = stage.trainer
    for step in range(steps):
        for lease in rollout.leases(B):
            rollout.finish(lease, step)
        reward.score(B)
        batch = trainer.box.ask(m.Take(step=step), 10)
        trainer.box.ask(commit_of(batch), 5)
        stage.load(rollout, step + 1)
    return trainer


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["a full disk", "a kill"])
def test_an_archive_that_is_cut_short_costs_nothing(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    stage = Stage(tmp_path, redis_url, replay=ReplayConfig(archive="all"))
    trainer = train(stage, 2)
    written, append = [], Archive.append

    def fails_at_the_second(self: Archive, batch: m.Batch, digest: str) -> None:
        if written:
            raise OSError(28, "No space left on device") if how == "a full disk" else SystemExit
        written.append(batch.step)
        append(self, batch, digest)

    monkeypatch.setattr(Archive, "append", fails_at_the_second)
    trainer.box.tell(m.Checkpointed(version=2, path="x"))
    stage.thread.join(10)
    assert not stage.thread.is_alive()
    monkeypatch.setattr(Archive, "append", append)
    stage = Stage(tmp_path, redis_url, replay=ReplayConfig(archive="all"))
    trainer = stage.peer("trainer", "trainer", "2")
    assert isinstance(trainer.box.ask(m.Checkpointed(version=2, path="x"), 5), m.Keep)
    stage.close()
    assert archive.steps(tmp_path) == [0, 1]
    assert all(len(batch.groups) == B for batch, _ in archive.read(tmp_path))


def test_a_column_that_the_run_has_only_now_is_not_in_the_archive_of_a_step_before(
    tmp_path: Path, redis_url: str
) -> None:
    stage = Stage(tmp_path, redis_url, replay=ReplayConfig(archive="all"))
    train(stage, 1)
    stage.close()
    again = Stage(tmp_path, redis_url, columns=BOTH, replay=ReplayConfig(archive="all"))
    trainer = again.peer("trainer", "trainer", "2")
    assert isinstance(trainer.box.ask(m.Checkpointed(version=1, path="x"), 5), m.Keep)
    again.close()
    ((batch, _),) = archive.read(tmp_path)
    assert all(group.columns.keys() == {REWARDS.name, "reward"} for group in batch.groups)


def test_a_broker_that_cannot_listen_ends_none_that_can(tmp_path: Path, redis_url: str) -> None:
    stage = Stage(tmp_path, redis_url)
    rollout = stage.rollout()
    (lease,) = rollout.leases(1)
    taken = BrokerConfig(bind=stage.broker.address)
    with pytest.raises(AddressError, match="another process has this port"):
        Broker(settings(tmp_path, broker=taken), redis_url)
    assert rollout.finish(lease) == m.Ack()
    stage.close()


def test_an_evaluation_that_was_cut_short_is_begun_again(tmp_path: Path, redis_url: str) -> None:
    asked = PromptsConfig.model_validate(
        {"train": {"type": "sort", "size": 50}, "eval": {"type": "sort", "size": 2, "seed": 1}, "eval_size": 2}
        | {"eval_every": 1}
    )
    stage = Stage(tmp_path, redis_url, prompts=asked)
    stage.broker._state.evaluation.recall({"label": "before", "step": 0, "reward": 0.5, "sets": {}})
    train(stage, 1)
    until(lambda: stage.broker._state.evaluation.round, 5, "the evaluation")
    stage.close()
    again = Stage(tmp_path, redis_url, prompts=asked)
    again.load(rollout := again.rollout(incarnation="2"), 1)
    found: list[str] = []
    while found.count("eval") < 2:
        found.append(rollout.next(m.Lease).purpose)
    under_way = again.broker._state.evaluation.round
    assert under_way and (under_way.label, under_way.step) == ("step 1", 1)
    assert not list(other_store(again.broker.state))
    again.close()


def test_a_store_that_knows_nothing_of_a_run_is_told_of_to_its_end(tmp_path: Path, redis_url: str) -> None:
    stage = Stage(tmp_path, redis_url)
    assert not list(other_store(stage.broker.state))
    train(stage, 1)
    stage.close()
    redis.Redis.from_url(redis_url).flushall()
    for _ in range(2):
        stage = Stage(tmp_path, redis_url)
        (line,) = other_store(stage.broker.state)
        assert line.startswith("store.url: the store knew nothing of the 1 steps that were done")
        stage.rollout()
        stage.close()


def test_an_evaluation_while_the_run_trains_waits_for_its_version_and_training_does_not(
    tmp_path: Path, redis_url: str
) -> None:
    asked = PromptsConfig.model_validate(
        {"train": {"type": "sort", "size": 50}, "eval": {"type": "sort", "size": 2, "seed": 1}, "eval_size": 2}
        | {"eval_every": 1}
    )
    stage = Stage(tmp_path, redis_url, prompts=asked)
    stage.broker._state.evaluation.recall({"label": "before", "step": 0, "reward": 0.5, "sets": {}})
    rollout, reward = stage.rollout(), stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=1000))
    first = rollout.leases(2 * B)
    for lease in first[:B]:
        rollout.finish(lease)
    reward.score(B)
    batch = stage.trainer.box.ask(m.Take(step=0), 10)
    stage.trainer.box.ask(commit_of(batch), 5)
    until(lambda: stage.broker._state.evaluation.round, 5, "the evaluation")
    other = stage.rollout("rollout-1")
    rollout.box.ask(m.StatusRequest(), 5)
    assert other.box.inbox.empty() and rollout.box.inbox.empty(), "both serve version 0"
    stage.load(other, 1)
    found: list[str] = []
    while found.count("eval") < 2:
        found.append(other.next(m.Lease).purpose)
    stage.close()


def test_a_run_that_ends_early_does_so_whatever_the_last_evaluation_says(tmp_path: Path, redis_url: str) -> None:
    """The trainer, which was told, takes no step any more."""
    asked = PromptsConfig.model_validate(
        {"train": {"type": "sort", "size": 50}, "eval": {"type": "sort", "size": 1, "seed": 1}, "eval_size": 1}
        | {"eval_every": 1, "stop_after": 2}
    )
    broker = Broker(settings(tmp_path, prompts=asked, steps=20), redis_url)

    def evaluated(label: str, step: int, reward: float) -> None:
        evaluation = broker._state.evaluation
        evaluation.start(label, step, None)
        (number,) = evaluation.leases.open
        assert evaluation.finish(number, step, step, 1, 2)
        broker._state.record_evaluation(evaluation.score(number, reward))

    broker._state.progress.phase = "training"
    for step, reward in enumerate((0.5, 0.4, 0.3)):
        evaluated(f"step {step}", step, reward)
    assert "2 evaluations in a row" in broker._state.progress.early and broker._state.groups.steps == 1
    broker._state.progress.phase = "evaluating_after"
    evaluated("after", 3, 0.9)
    broker._remember()
    broker._commit()
    broker._state.router.close()
    again = Broker(settings(tmp_path, prompts=asked, steps=20), redis_url)
    assert "2 evaluations in a row" in again._state.progress.early and again._state.groups.steps == 1
    again._state.router.close()
    other = Broker(settings(tmp_path, prompts=asked.model_copy(update={"stop_after": 0}), steps=20), redis_url)
    assert not other._state.progress.early and other._state.groups.steps == 20, "a key was changed"
    other._state.router.close()


def test_prompts_that_were_passed_over_at_the_end_stay_so() -> None:
    journal = Memory()

    def tracker(last: int) -> GroupTracker:
        """Whose curriculum finds nothing more to ask before draw ``last``."""
        gate, nothing = Gate(2, 2, 1), lambda *_: None
        return GroupTracker(journal, gate, COLUMNS, 9, 5, None, nothing, nothing, lambda draw: max(draw, last))

    groups = tracker(5)
    assert groups.next_lease(0) is None and groups.ended(0)
    journal.commit()
    assert tracker(0).ended(0), "what rests no more is not asked after all: nobody takes a step any more"


def test_a_step_that_only_the_trainer_remembers_leaves_a_gap_in_the_archive(tmp_path: Path, redis_url: str) -> None:
    stage = Stage(tmp_path, redis_url, replay=ReplayConfig(archive="all"))
    stage.rollout()
    row = m.LedgerRow(step=0, groups=[0, 1, 2], seed=7, max_lag=1, digest="digest")
    assert stage.trainer.box.ask(m.LedgerTail(version=1, steps=[row]), 5) == m.Resumed(committed=1)
    assert isinstance(stage.trainer.box.ask(m.Checkpointed(version=1, path="x"), 5), m.Keep)
    stage.close()
    assert archive.steps(tmp_path) == []


def test_what_was_not_flushed_is_not_said() -> None:
    router = RouterServer("tcp://127.0.0.1:0")
    box = Mailbox(router.address, "rollout-0#1")
    asked = box.ask_later(m.Credit(total=1), 1.0)
    (identity, request, _), *_ = [each for _ in range(50) for each in router.receive(0.1)][:1]
    router.send(identity, m.Ack(), request)
    threading.Thread(target=router.close).start()
    with pytest.raises(DeadlineError):
        asked.result(5)
    box.close()


def test_a_group_that_lacked_a_column_that_is_not_wanted_any_more_is_ready(tmp_path: Path, redis_url: str) -> None:
    stage = Stage(tmp_path, redis_url, columns=BOTH)
    rollout, reward = stage.rollout(), stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=100))
    for lease in rollout.leases(B):
        rollout.finish(lease)
    seen: set[int] = set()
    while len(seen) < B:
        seen |= {item.number for item in reward.next(m.Work).items}
    values = np.array([0, 1], np.float32)
    scores = [m.Score(purpose="train", number=number, values=values) for number in range(B)]
    reward.box.ask(m.Scores(column=REWARDS.name, scores=scores), 5)
    stage.close()
    again = Stage(tmp_path, redis_url)
    again.rollout(incarnation="2")
    batch = again.trainer.box.ask(m.Take(step=0), 10)
    assert isinstance(batch, m.Batch) and [g.number for g in batch.groups] == list(range(B))
    assert all(group.columns["reward"].tolist() == [0, 1] for group in batch.groups)
    again.close()


@pytest.mark.parametrize("agents", [False, True])
def test_a_lower_bound_drops_what_is_too_old_whenever_it_comes(tmp_path: Path, redis_url: str, agents: bool) -> None:
    """What had come before the broker ended, and what a rollout that lives on says afterwards."""
    stage = Stage(tmp_path, redis_url, gate=GateConfig(max_lag=3, groups_per_step=B))
    rollout = stage.rollout()
    leases = rollout.leases(3 * B)
    for lease in leases[: 2 * B]:
        rollout.finish(lease)
    stage.close()
    lower = settings(tmp_path, gate=GateConfig(max_lag=0, groups_per_step=B))
    if agents:  # nothing may be missing where what is too old is dropped
        broker = Broker(dataclasses.replace(lower, agents=True), redis_url)
        assert set(broker._state.groups.replay.entries) == set(range(B))
        broker._state.router.close()
        return
    again = Stage(tmp_path, redis_url, gate=GateConfig(max_lag=0, groups_per_step=B))
    rollout = again.rollout(incarnation="2")
    for lease in leases[2 * B :]:
        rollout.finish(lease)
    groups = again.broker._state.groups
    assert set(groups.replay.entries) == set(range(B)), "those of version 0 that step 0 may take"
    assert groups.drops == 2 * B and not groups.consecutive_drops
    again.close()


def test_a_group_without_the_greedy_answer_that_is_asked_for_now_is_dropped_scored_or_not(
    tmp_path: Path, redis_url: str
) -> None:
    stage = Stage(tmp_path, redis_url)
    rollout = stage.rollout()
    for lease in rollout.leases(B):
        rollout.finish(lease)
    stage.close()
    greedy = SamplingConfig(n=N, max_new_tokens=8).training(True)
    broker = Broker(settings(tmp_path, sampling=greedy), redis_url)
    groups = broker._state.groups
    assert groups.drops == B and not groups.replay.entries and not groups.consecutive_drops
    broker._state.router.close()


def test_a_rollout_that_leaves_in_good_order_has_failed_at_nothing(tmp_path: Path, redis_url: str) -> None:
    """However often: a run may be stopped and gone on with a hundred times while a group is being generated."""
    for life in range(4):
        stage = Stage(tmp_path, redis_url)
        leases = stage.rollout(incarnation=str(life)).leases(2 * B)
        assert [(lease.number, lease.attempt) for lease in leases] == [(number, 1) for number in range(2 * B)]
        stage.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_members_hear_of_a_broker_that_comes_up_beside_a_store_that_reads_what_it_has(tmp_path: Path) -> None:
    door, store = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{door.getsockname()[1]}"
    door.close()

    def reads(connection: socket.socket) -> None:
        while connection.recv(65536):
            connection.sendall(b"-LOADING Redis is loading the dataset in memory\r\n")

    def accepts() -> None:
        with suppress(OSError):  # until it is closed
            while True:
                threading.Thread(target=reads, args=store.accept()[:1], daemon=True).start()

    member = Mailbox(address, "rollout-0#1")
    member.beat_s, member.beat = 0.1, m.Heartbeat
    heard = member.heard_at
    config = settings(tmp_path, broker=BrokerConfig(bind=address), store=StoreConfig(retry_s=0.5))
    url = f"redis://127.0.0.1:{store.getsockname()[1]}/0"
    broker = threading.Thread(target=Broker, args=(config, url), daemon=True)
    threading.Thread(target=accepts, daemon=True).start()
    broker.start()
    until(lambda: member.heard_at > heard + 1.0, 10, "an answer, and more")
    assert broker.is_alive()
    member.close()
    store.close()


def test_members_hear_of_a_broker_that_reads_its_prompts(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = socket.create_server(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{door.getsockname()[1]}"
    door.close()
    member = Mailbox(address, "rollout-0#1")
    member.beat_s, member.beat = 0.1, m.Heartbeat
    heard, read = member.heard_at, state.open_source

    def slowly(config: Any) -> Any:
        until(lambda: member.heard_at > heard + 1.0, 10, "an answer, and more")
        return read(config)

    monkeypatch.setattr(state, "open_source", slowly)
    broker = Broker(settings(tmp_path, broker=BrokerConfig(bind=address)), redis_url)
    assert len(broker._state.prompts) == 50
    broker._state.router.close()
    member.close()


def test_what_keeps_the_last_evaluation_is_named(tmp_path: Path, redis_url: str) -> None:
    prompts = PromptsConfig.model_validate(
        {"train": {"type": "sort", "size": 50}, "eval": {"type": "sort", "size": 4}, "eval_size": 2}
    )
    stage = Stage(tmp_path, redis_url, prompts=prompts, broker=BrokerConfig(dead_after_s=20, stall_s=1))
    stage.load(stage.rollout(credit=0), 0)
    until(lambda: stage.broker.state["stall"], 10, "it to be noticed")
    said = stage.broker.state["stall"]
    waits = "it waits for room at rollout-0"
    assert said.startswith(f"the evaluation 'before' lacks 2 of 2 prompts: {waits}"), said
    assert re.search(r"; nothing was completed for [1-9]\d* s$", said), said
    stage.close()


def tracker(journal: Memory, steps: int = 400, max_lag: int = 1) -> GroupTracker:
    def nothing(*_: Any) -> None:
        return None

    return GroupTracker(journal, Gate(2, 2, max_lag), COLUMNS, steps, None, None, nothing, nothing)


def trained(step: int, *numbers: int) -> m.LedgerRow:
    return m.LedgerRow(step=step, groups=list(numbers), seed=7, max_lag=1, digest=f"digest-{step}")


@pytest.mark.parametrize("before", [1, 4])
def test_in_a_new_store_the_gate_counts_on_with_another_batch(before: int) -> None:
    groups = tracker(Memory())  # two groups a step now
    groups.merge([trained(step, *range(before * step, before * (step + 1))) for step in (98, 99)])
    following = 100 * before
    wanted = [groups.gate.required_version(following + ahead) for ahead in range(4)]
    assert wanted == [99, 100, 100, 101], "B = 2, W = 2, a bound of 1"
    assert groups.leases.next_number == following


def test_in_a_new_store_what_a_later_step_took_out_of_turn_is_no_drop() -> None:
    groups = tracker(Memory())
    groups.merge([trained(4, 9, 10), trained(5, 8, 11)])
    assert groups.drops == 0 and groups.gate.rank(12) == 12


def test_numbers_between_those_that_the_trainer_remembers_are_generated_again() -> None:
    groups = tracker(Memory())
    groups.merge([trained(0, 0, 2)])  # 1 was overtaken, and its answer is lost
    lease = groups.next_lease(5)
    assert lease and lease.number == 1
    groups.merge([trained(1, 1, 4)])
    lease = groups.next_lease(5)
    assert lease and (lease.number, lease.draw) == (3, 3) and groups.leases.next_number == 5
    groups.leases.grant(lease, "rollout-0#1", 0.0)
    assert groups.finish(3, 2) and groups.oldest_open() == 3


def test_a_trainer_with_a_checkpoint_goes_on_in_a_new_store() -> None:
    journal = Memory()
    groups = tracker(journal)
    groups.merge([trained(300, 640, 641), trained(301, 642, 643)])  # 40 groups had been dropped before
    journal.commit()
    for taken_up in (groups, tracker(journal)):
        assert taken_up.ledger.committed == 302 and taken_up.ledger.first == 300
        assert taken_up.gate.rank(644) == 604 and taken_up.gate.required_version(644) <= 302
        lease = taken_up.next_lease(302)
        assert lease and lease.number == 644, "what serves the newest version goes on"


def test_a_broker_that_was_replaced_says_nothing_more(tmp_path: Path, redis_url: str) -> None:
    stage = Stage(tmp_path, redis_url)
    rollout = stage.rollout()
    (lease,) = rollout.leases(1)
    second = Broker(settings(tmp_path), redis_url)
    failed: list[BaseException] = []
    threading.excepthook, before = lambda found: failed.append(found.exc_value), threading.excepthook  # type: ignore
    try:
        with pytest.raises(DeadlineError):
            rollout.box.ask_later(m.Failed(purpose="train", number=lease.number, attempt=1, error="no"), 2).result(6)
        stage.thread.join(10)
    finally:
        threading.excepthook = before
    assert isinstance(failed[0], StoreError) and "this one was replaced" in str(failed[0])
    assert second._state.groups.leases.open[lease.number].attempt == 0, "nothing was written"
    second._state.router.close()
    for peer in stage.peers:
        peer.box.close()


def test_a_supervisor_that_comes_when_everybody_has_left_still_sees_the_end(tmp_path: Path, redis_url: str) -> None:
    """A run may be over before the supervisor's hello, which a broker that was killed did not answer, is said again."""
    stage = Stage(tmp_path, redis_url, supervised=True, steps=1)
    train(stage, 1).box.ask(m.Checkpointed(version=1, path="", final=True), 5)
    for peer in stage.peers:
        peer.box.tell(m.Bye(reason="the run is complete"))
    until(lambda: not list(stage.broker._state.members), 5, "all to leave")
    stage.thread.join(0.3)
    assert stage.thread.is_alive()
    supervisor = stage.peer("observer", "supervisor").box
    status = supervisor.ask(m.StatusRequest(), 5)
    assert isinstance(status, m.Status) and status.state["phase"] == "done"
    supervisor.ask(m.StopRun(reason="the supervisor has seen the end", seen=True), 5)
    stage.thread.join(2)
    assert not stage.thread.is_alive()
    stage.close()
