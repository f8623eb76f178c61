"""The broker as a process sees it: real sockets, real Redis, hand-made actors."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis

from penstock.protocols import messages as m
from penstock.protocols.columns import Column, ColumnTable, WeightedSum
from penstock.protocols.experience import Group, GroupSummary, Trajectory, as_bytes, summarize
from penstock.protocols.mailbox import FencedError, Mailbox, RefusedError
from penstock.protocols.packed_groups import pack_group
from penstock.protocols.versions import Digests
from penstock.services.broker import trackers
from penstock.services.broker.config import BrokerConfig, GateConfig, PromptsConfig, ReplayConfig, StoreConfig
from penstock.services.broker.service import Broker
from penstock.services.broker.state import BrokerSettings
from penstock.services.broker.store import StoreError
from penstock.services.rollout.config import SamplingConfig
from penstock.services.runtime.lines import read_lines

N, B = 2, 3
REWARDS = Column(name="reward/exact", scorer="reward", nullable=True, evaluated=True)


def settings(folder: Path, **changes: Any) -> BrokerSettings:
    sampling = SamplingConfig(n=N, max_new_tokens=8)
    defaults: dict[str, Any] = {
        "run": "test",
        "folder": folder,
        "seed": 0,
        "steps": 4,
        "broker": BrokerConfig(dead_after_s=20, heartbeat_s=0.2, lease_s=60),  # nobody is, however busy the machine
        "gate": GateConfig(max_lag=1, groups_per_step=B),
        "store": StoreConfig(retry_s=2),
        "replay": ReplayConfig(),
        "prompts": PromptsConfig.model_validate({"train": {"type": "sort", "size": 50}}),
        "sampling": sampling.training(),
        "eval_sampling": sampling.greedy(),
        "columns": ColumnTable(columns=(REWARDS,), sums=(WeightedSum(name="reward", terms={REWARDS.name: 1.0}),)),
    }
    return BrokerSettings(**(defaults | changes))


class Peer:
    """An actor in the test's hands."""

    def __init__(self, address: str, kind: Any, name: str, incarnation: str = "1") -> None:
        self.box = Mailbox(address, f"{name}#{incarnation}")
        self.hello = m.Hello(kind=kind, name=name, host="here", pid=1)
        assert isinstance(self.box.ask(self.hello, 5), m.Welcome)
        self.held: set[int] = set()
        self.box.arrived = self._arrived
        self.box.beat_s, self.box.beat = 0.2, lambda: m.Heartbeat(holding={"train": list(self.held)})

    def _arrived(self, message: m.Message) -> None:
        if isinstance(message, m.Lease):
            self.held.add(message.number)
        elif isinstance(message, m.Work):
            self.held.update(item.number for item in message.items)

    def next(self, kind: type[m.Message], timeout: float = 5) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            event = self.box.inbox.get(timeout=max(0.01, deadline - time.monotonic()))
            if isinstance(event, kind):
                return event

    def leases(self, count: int) -> list[m.Lease]:
        return [self.next(m.Lease) for _ in range(count)]

    def finish(
        self, lease: m.Lease, version: int = 0, failures: Sequence[str] = (), metrics: dict[str, float] | None = None
    ) -> m.Message:
        prompt = np.array([3, 4], np.int32)
        made = [
            Trajectory(
                np.r_[prompt, 5, 6].astype(np.int32), np.array([0, 0, 1, 1], np.uint8),
                np.array([0, 0, -1, -1], np.float32), np.array([-1, -1, version, version], np.int32), "ab",
                failure=failure, metrics=metrics or {},
            )
            for failure in failures or [""] * lease.sampling.n
        ]  # fmt: skip
        return self.box.ask(finished(lease, Group(lease.number, lease.prompt, made)), 5)

    def score(self, count: int, rewards: list[float] | None = None) -> list[int]:
        numbers = []
        while len(numbers) < count:
            work = self.next(m.Work)
            values = np.array(rewards or [0, 1], np.float32)
            scores = [m.Score(purpose=i.purpose, number=i.number, values=values) for i in work.items]
            self.box.ask(m.Scores(column=REWARDS.name, scores=scores), 5)
            numbers += [i.number for i in work.items]
        return numbers


def finished(lease: m.Lease, group: Group) -> m.Finished:
    return m.Finished(
        purpose=lease.purpose,
        number=lease.number,
        attempt=lease.attempt,
        summary=summarize(group),
        experience=as_bytes(pack_group(group)),
    )


def trained(batch: m.Batch, digest: str = "", metrics: dict[str, float] | None = None) -> m.Commit:
    """The trainer's word that it has learned from ``batch``."""
    numbers = [group.number for group in batch.groups]
    return m.Commit(step=batch.step, groups=numbers, digest=digest or f"digest-{batch.step}", metrics=metrics or {})


class Stage:
    """A broker in a thread, and its peers."""

    def __init__(self, folder: Path, url: str, supervised: bool = False, **changes: Any) -> None:
        self.folder = folder
        self.broker = Broker(settings(folder, **changes), url, supervised)
        self.error: str | None = None
        self.peers: list[Peer] = []
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        self.error = self.broker.serve()

    def peer(self, kind: str, name: str, incarnation: str = "1") -> Peer:
        peer = Peer(self.broker.address, kind, name, incarnation)
        self.peers.append(peer)
        return peer

    def rollout(self, name: str = "rollout-0", incarnation: str = "1", credit: int = 100, version: int = 0) -> Peer:
        peer = self.peer("rollout", name, incarnation)
        if version >= 0:
            self.load(peer, version)
        peer.box.tell(m.Credit(total=credit))
        peer.box.ask(m.StatusRequest(), 5)  # what others say from now on comes after its credit
        return peer

    def load(self, peer: Peer, version: int) -> None:
        """Publishes ``version`` (once) and has ``peer`` load it."""
        digests = Digests(buckets=(), whole=f"digest-{version}")
        trainer = next((p for p in self.peers if p.hello.kind == "trainer"), None) or self.peer("trainer", "trainer")
        trainer.box.ask(m.CommitVersion(targets=[], epoch=0, version=version, digests=digests), 5)
        peer.box.ask(m.Loaded(epoch=0, version=version, digest=digests.whole, transport="shm"), 5)

    @property
    def trainer(self) -> Peer:
        return next(p for p in self.peers if p.hello.kind == "trainer")

    def close(self) -> None:
        self.broker.stop("the test is over")
        for peer in self.peers:
            try:
                peer.box.tell(m.Bye(reason="over"))
            except FencedError:
                pass
            peer.box.close()
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def stage(tmp_path: Path, redis_url: str) -> Iterator[Stage]:
    made = Stage(tmp_path, redis_url)
    yield made
    made.close()


def test_the_gate_opens_with_the_versions(stage: Stage) -> None:
    rollout = stage.rollout()
    reward = stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=100))
    leases = rollout.leases(2 * B)  # version 0, bound 1: two steps' groups
    assert [lease.number for lease in leases] == list(range(2 * B))
    time.sleep(0.2)
    assert rollout.box.inbox.empty()
    for lease in leases:
        rollout.finish(lease)
    reward.score(2 * B)
    batch = stage.trainer.box.ask(m.Take(step=0), 5)
    assert [g.number for g in batch.groups] == [0, 1, 2]
    again = stage.trainer.box.ask(m.Take(step=0), 5)
    assert [g.number for g in again.groups] == [0, 1, 2] and again.seed == batch.seed
    stage.trainer.box.ask(trained(batch, "d1", {"reward": 0.5}), 5)
    time.sleep(0.2)
    assert rollout.box.inbox.empty()  # committed, but this rollout does not serve version 1 yet
    stage.load(rollout, 1)
    assert [lease.number for lease in rollout.leases(B)] == [6, 7, 8]


def test_what_is_acknowledged_is_in_redis(stage: Stage, redis_url: str) -> None:
    rollout = stage.rollout()
    lease = rollout.leases(1)[0]
    assert rollout.finish(lease) == m.Ack()
    client = redis.Redis.from_url(redis_url)
    assert client.hget("penstock:test:payload:0", "experience")
    assert client.hexists("penstock:test:replay", "0") and not client.hexists("penstock:test:leases", "0")


@pytest.fixture
def impatient(tmp_path: Path, redis_url: str) -> Iterator[Stage]:
    made = Stage(tmp_path, redis_url, broker=BrokerConfig(dead_after_s=1.5, heartbeat_s=0.2, lease_s=60))
    yield made
    made.close()


def test_a_dead_rollouts_groups_are_leased_again_and_its_late_answer_counts_once(impatient: Stage) -> None:
    stage = impatient
    first = stage.rollout("rollout-0")
    held = first.leases(2 * B)
    second = stage.rollout("rollout-1")
    first.box.beat = None  # wedged
    again = second.leases(2 * B)
    assert [lease.number for lease in again] == [lease.number for lease in held]
    assert {lease.attempt for lease in again} == {2}
    second.finish(again[0])
    late = Peer(stage.broker.address, "rollout", "rollout-0", "1")  # it wakes up and says hello again
    stage.peers.append(late)
    assert late.finish(held[0]) == m.Ack() and late.finish(held[1]) == m.Ack()
    assert second.finish(again[1]) == m.Ack()
    state = stage.trainer.box.ask(m.StatusRequest(), 5).state
    assert state["totals"]["finished"] == 2 and state["totals"]["late_answers"] == 2


def test_a_clock_that_is_set_back_holds_no_dead_rollouts_groups(
    impatient: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = impatient
    first = stage.rollout("rollout-0")
    held, second = first.leases(2 * B), stage.rollout("rollout-1")
    hour_ago = time.time() - 3600
    monkeypatch.setattr(time, "time", lambda: hour_ago)
    first.box.beat = None
    assert [lease.number for lease in second.leases(2 * B)] == [lease.number for lease in held]


def test_a_new_incarnation_fences_the_old(stage: Stage) -> None:
    old = stage.rollout()
    held = old.leases(2 * B)
    new = stage.rollout(incarnation="2")
    with pytest.raises(FencedError, match="replaced by rollout-0#2"):
        old.finish(held[0])
    assert [lease.number for lease in new.leases(2 * B)] == [lease.number for lease in held]


def test_a_restarted_rollout_is_not_believed_about_its_old_version(stage: Stage) -> None:
    rollout = stage.rollout()
    rollout.leases(2 * B)
    empty = stage.rollout(incarnation="2", version=-1)
    time.sleep(0.3)
    assert not any(isinstance(e, m.Lease) for e in list(iter_inbox(empty)))


def iter_inbox(peer: Peer) -> Iterator[object]:
    while not peer.box.inbox.empty():
        yield peer.box.inbox.get()


def test_groups_without_rewards_are_dropped_with_their_reason(stage: Stage) -> None:
    rollout, reward = stage.rollout(), stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=100))
    for lease in rollout.leases(2 * B):
        rollout.finish(lease)
    work = reward.next(m.Work)
    nan = float("nan")
    failed = m.Score(purpose="train", number=0, values=np.array([nan, 1], np.float32), errors=["f raised Oops"])
    reward.box.ask(m.Scores(column=REWARDS.name, scores=[failed]), 5)
    assert stage.trainer.box.ask(m.StatusRequest(), 5).state["dropped"] == 1
    assert "f raised Oops" in (stage.folder / "dropped.jsonl").read_text()
    assert work.items[0].number == 0
    assert rollout.leases(1)[0].number == 2 * B  # its place in the order is free, its number is not


def test_what_has_failed_has_no_reward_also_where_a_scorer_alone_gives_it(tmp_path: Path, redis_url: str) -> None:
    liking = Column(name="liking", scorer="taste")
    table = ColumnTable(columns=(liking,), sums=(WeightedSum(name="reward", terms={"liking": 1.0}),))
    stage = Stage(tmp_path, redis_url, columns=table)
    try:
        rollout, taste = stage.rollout(), stage.peer("taste", "taste-0")
        taste.box.tell(m.Credit(total=100))
        leases = rollout.leases(2 * B)
        rollout.finish(leases[0], failures=["", "step raised Oops"])
        for lease in leases[1:]:
            rollout.finish(lease)
        values = np.array([1, 1], np.float32)
        scores = [m.Score(purpose="train", number=lease.number, values=values) for lease in leases]
        taste.box.ask(m.Scores(column="liking", scores=scores), 5)
        (line,) = (tmp_path / "dropped.jsonl").read_text().splitlines()
        assert json.loads(line)["group"] == leases[0].number and "step raised Oops" in line
    finally:
        stage.close()


def test_a_reward_that_dies_loses_nothing(stage: Stage) -> None:
    rollout = stage.rollout()
    first = stage.peer("reward", "reward-0")
    first.box.tell(m.Credit(total=100))
    for lease in rollout.leases(2 * B):
        rollout.finish(lease)
    first.next(m.Work)
    second = stage.peer("reward", "reward-0", "2")
    second.box.tell(m.Credit(total=100))
    assert sorted(second.score(2 * B)) == list(range(2 * B))


def test_scorers_get_no_more_than_their_credit(stage: Stage) -> None:
    rollout, reward = stage.rollout(), stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=2))
    for lease in rollout.leases(2 * B):
        rollout.finish(lease)
    time.sleep(0.3)
    assert sum(len(w.items) for w in iter_inbox(reward) if isinstance(w, m.Work)) == 2


def test_what_a_rollout_says_wrong_is_refused_and_the_group_can_still_be_finished(stage: Stage) -> None:
    rollout = stage.rollout()
    lease = rollout.leases(1)[0]
    said = GroupSummary(trajectories=N, tokens=8, sampled=4, oldest=0, newest=0)
    for wrong, complaint in (({"trajectories": 1}, "has 1 trajectories, not 2"), ({"newest": 7}, "does not exist yet")):
        message = m.Finished(
            purpose="train",
            number=0,
            attempt=1,
            summary=said.model_copy(update=wrong),
            experience=np.zeros(9, np.uint8),
        )
        with pytest.raises(RefusedError, match=complaint):
            rollout.box.ask(message, 5)
    assert rollout.finish(lease) == m.Ack()


def test_numbers_that_are_none_and_words_without_end_cost_the_broker_nothing(stage: Stage) -> None:
    """It would end of them, and again of the same when it is back: who has said them says them again."""
    rollout, reward = stage.rollout(), stage.peer("reward", "reward-0")
    reward.box.tell(m.Heartbeat(gauges={"calls_failed/reward/exact": float("nan"), "calls_in_flight": float("inf")}))
    said = GroupSummary(trajectories=N, tokens=8, sampled=4, oldest=0, newest=0)
    for wrong in ({"sampled": 2**64 - 1}, {"oldest": -(2**63)}):
        summary = said.model_copy(update=wrong)
        message = m.Finished(purpose="train", number=0, attempt=1, summary=said, experience=np.zeros(9, np.uint8))
        with pytest.raises(RefusedError, match=f"summary.{next(iter(wrong))}"):
            rollout.box.ask(message.model_copy(update={"summary": summary}), 5)
    (lease,) = rollout.leases(1)
    assert rollout.finish(lease) == m.Ack()
    reward.box.tell(m.Credit(total=1))
    (item,) = reward.next(m.Work).items
    errors = ["judge raised " + "x" * (1 << 20)]
    scores = [m.Score(purpose=item.purpose, number=item.number, values=np.array([0, 1], np.float32), errors=errors)]
    reward.box.ask(m.Scores(column=REWARDS.name, scores=scores), 5)
    state = stage.trainer.box.ask(m.StatusRequest(), 5).state
    assert len(str(state)) < 50_000 and stage.thread.is_alive()


def test_experience_that_no_scorer_can_read_costs_its_group_alone(stage: Stage) -> None:
    """Once two have said so, where there are two: it might be one scorer that can read nothing."""
    rollout, reward = stage.rollout(), stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=100))
    for lease in rollout.leases(2 * B):
        rollout.finish(lease)
    given = [item.number for _ in range(2 * B) for item in reward.next(m.Work).items]
    assert given == list(range(2 * B))
    other = stage.peer("reward", "reward-1")
    other.box.tell(m.Credit(total=1))
    other.box.ask(m.StatusRequest(), 5)
    unusable = m.Score(purpose="train", number=1, values=np.zeros(0, np.float32), unusable="not msgpack")
    said = m.Scores(column=REWARDS.name, scores=[unusable])
    reward.box.ask(said, 5)
    reward.box.ask(said, 5)  # not acknowledged in time, say
    assert not (stage.folder / "dropped.jsonl").read_text()
    assert [item.number for item in other.next(m.Work).items] == [1]
    other.box.ask(said, 5)
    assert "not msgpack" in (stage.folder / "dropped.jsonl").read_text()
    assert rollout.leases(1)[0].number == 2 * B


def test_scores_that_are_not_the_columns_are_refused(stage: Stage) -> None:
    rollout, reward = stage.rollout(), stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=100))
    rollout.finish(rollout.leases(2 * B)[0])
    reward.next(m.Work)
    for values, complaint in (
        (np.zeros(3, np.float32), r"expected float32 \[2\] \(one a trajectory\), got float32 \[3\]"),
        (np.zeros(N, np.int32), "expected float32"),
        (np.array([np.inf, 0], np.float32), "infinite"),
    ):
        score = m.Score(purpose="train", number=0, values=values)
        with pytest.raises(RefusedError, match=complaint):
            reward.box.ask(m.Scores(column=REWARDS.name, scores=[score]), 5)
    good = m.Score(purpose="train", number=0, values=np.zeros(N, np.float32))
    with pytest.raises(RefusedError, match="'surprise' is no column that a reward of this run writes"):
        reward.box.ask(m.Scores(column="surprise", scores=[good]), 5)
    assert reward.box.ask(m.Scores(column=REWARDS.name, scores=[good]), 5) == m.Ack()


def test_an_actor_that_the_run_has_not_is_refused(stage: Stage) -> None:
    stage.peer("reward", "reward-0")  # or the broker would wait for somebody to come
    box = Mailbox(stage.broker.address, "critic-0#1")
    with pytest.raises(RefusedError, match="'critic' is no actor of this run; it has observer, reward, rollout"):
        box.ask(m.Hello(kind="critic", name="critic-0", host="", pid=1), 5)
    with pytest.raises(RefusedError, match="'xxxx") as caught:
        box.ask(m.Hello(kind="x" * 1_000_000, name="critic-0", host="", pid=1), 5)
    assert len(str(caught.value)) < 3000, "what it quotes may be as large as a message"
    box.close()


def test_a_second_trainer_of_another_name_is_refused_and_one_of_its_own_name_takes_its_place(stage: Stage) -> None:
    stage.peer("reward", "reward-0")
    box = Mailbox(stage.broker.address, "trainer-b#1")
    with pytest.raises(RefusedError, match="a run has one trainer, which is called trainer, and not trainer-b"):
        box.ask(m.Hello(kind="trainer", name="trainer-b", host="", pid=1), 5)
    box.close()


def test_a_group_that_may_kill_its_rollouts_is_given_alone_and_then_dropped(stage: Stage) -> None:
    held = stage.rollout(incarnation="1").leases(2 * B)
    stage.rollout(incarnation="2").leases(2 * B)
    for incarnation in "345":
        suspect = stage.rollout(incarnation=incarnation, credit=8)
        assert [lease.number for lease in suspect.leases(1)] == [held[0].number]
        time.sleep(0.2)
        assert not [e for e in iter_inbox(suspect) if isinstance(e, m.Lease)]
    last = stage.rollout(incarnation="6", credit=8)
    assert [lease.number for lease in last.leases(1)] == [held[1].number]
    last.finish(m.Lease(purpose="train", number=1, attempt=3, seed=0, prompt=held[1].prompt, sampling=held[1].sampling))
    assert last.leases(1)[0].number == held[2].number
    assert "leased 5 times without an answer" in (stage.folder / "dropped.jsonl").read_text()


def test_while_a_suspected_group_waits_for_an_idle_rollout_the_others_go_on(stage: Stage) -> None:
    (suspect,) = stage.rollout(credit=1).leases(1)
    assert stage.rollout(incarnation="2", credit=1).leases(1)[0].number == suspect.number
    roomy, other = stage.rollout("rollout-1", credit=2), stage.rollout("rollout-2", credit=1)
    held, (beside,) = roomy.leases(2), other.leases(1)
    stage.rollout(incarnation="3", credit=0)  # the second was killed, too
    roomy.box.tell(m.Credit(total=9))
    roomy.box.ask(m.StatusRequest(), 5)
    other.box.tell(m.Credit(total=2))
    assert other.leases(1)[0].number > beside.number > held[-1].number
    assert not [e for e in iter_inbox(roomy) if isinstance(e, m.Lease)], "it is to be idle"
    for lease in held:
        roomy.finish(lease)
    assert [lease.number for lease in roomy.leases(1)] == [suspect.number]
    other.box.tell(m.Credit(total=3))
    time.sleep(0.2)
    assert not [e for e in iter_inbox(roomy) if isinstance(e, m.Lease)], "it holds a suspect"


def test_a_step_that_was_trained_on_other_groups_is_not_taken_for_this_one(stage: Stage) -> None:
    """As where the store has lost a step that the trainer holds, and the critic has had it taken anew."""
    rollout, reward = stage.rollout(), stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=100))
    for lease in rollout.leases(2 * B):
        rollout.finish(lease)
    reward.score(2 * B)
    batch = stage.trainer.box.ask(m.Take(step=0), 5)
    wrong = trained(batch).model_copy(update={"groups": [1, 2, 3]})
    with pytest.raises(RefusedError, match=r"step 0 is of the groups \[0, 1, 2\], and was trained on \[1, 2, 3\]"):
        stage.trainer.box.ask(wrong, 5)
    stage.trainer.box.ask(trained(batch), 5)


def test_nothing_is_leased_beyond_the_last_step(tmp_path: Path, redis_url: str) -> None:
    stage = Stage(tmp_path, redis_url, steps=1)
    rollout = stage.rollout()
    assert [lease.number for lease in rollout.leases(B)] == list(range(B))
    time.sleep(0.3)
    assert not [e for e in iter_inbox(rollout) if isinstance(e, m.Lease)]
    rollout.box.ask(m.Failed(purpose="train", number=1, attempt=1, error="no"), 5)
    assert rollout.leases(1)[0].number == B  # in the place of the one that failed
    stage.close()


@pytest.mark.parametrize("value", [[1.0, 1.0], [0.1, 0.1]])
def test_too_many_filtered_groups_in_a_row_end_the_run(tmp_path: Path, redis_url: str, value: list[float]) -> None:
    replay = ReplayConfig(filter="zero_variance", max_consecutive_filtered=4)
    stage = Stage(tmp_path, redis_url, replay=replay)
    rollout, reward = stage.rollout(), stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=100))
    for lease in rollout.leases(2 * B):
        rollout.finish(lease)
    reward.score(4, rewards=value)
    assert rollout.next(m.Stop)
    stage.close()
    assert stage.error and "nothing left to learn" in stage.error


def test_too_many_drops_in_a_row_end_the_run_with_the_reason(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str | None] = []
    tracker = SimpleNamespace(log=lambda *_: None, table=lambda *_: None, close=told.append)
    monkeypatch.setitem(trackers.MAKERS, "wandb", lambda *_: tracker)
    stage = Stage(tmp_path, redis_url, broker=BrokerConfig(max_consecutive_drops=3), trackers=("wandb",))
    rollout = stage.rollout()
    for lease in rollout.leases(3):
        rollout.box.ask(m.Failed(purpose="train", number=lease.number, attempt=1, error="no such token"), 5)
    assert rollout.next(m.Stop)
    stage.close()
    assert stage.error and "3 groups were dropped in a row" in stage.error and "no such token" in stage.error
    assert told == [stage.error], "trackers, too"


def test_the_last_step_takes_what_the_prompts_have_left(tmp_path: Path, redis_url: str) -> None:
    prompts = PromptsConfig.model_validate({"train": {"type": "sort", "size": 4}, "epochs": 1})
    stage = Stage(tmp_path, redis_url, prompts=prompts)
    rollout, reward = stage.rollout(), stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=100))
    for lease in rollout.leases(4):
        rollout.finish(lease)
    reward.score(4)
    sizes = []
    for step in (0, 1):
        batch = stage.trainer.box.ask(m.Take(step=step), 5)
        sizes.append(len(batch.groups))
        stage.trainer.box.ask(trained(batch), 5)
    assert sizes == [3, 1]
    ended = stage.trainer.box.ask(m.Take(step=2), 5)
    assert isinstance(ended, m.Exhausted) and ended.reason == "the prompts ended"
    stage.close()


def judge_two_steps(stage: Stage) -> None:
    rollout, reward = stage.rollout(), stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=100))
    for lease in rollout.leases(2 * B):
        rollout.finish(lease)
    reward.score(2 * B)


def test_a_step_that_was_taken_keeps_its_groups_and_its_bound_however_the_run_goes_on(
    tmp_path: Path, redis_url: str
) -> None:
    """Taken, not committed: the next trainer is to train on it under the bound that its groups were made under."""
    stage = Stage(tmp_path, redis_url, gate=GateConfig(max_lag=2, groups_per_step=B))
    judge_two_steps(stage)
    taken = [stage.trainer.box.ask(m.Take(step=step), 5) for step in (0, 1)]
    stage.close()

    again = Stage(tmp_path, redis_url, gate=GateConfig(max_lag=0, groups_per_step=B))
    trainer = again.peer("trainer", "trainer")
    retaken = [trainer.box.ask(m.Take(step=step), 5) for step in (0, 1)]
    assert [batch.max_lag for batch in retaken] == [2, 2]
    assert [[g.number for g in b.groups] for b in retaken] == [[g.number for g in b.groups] for b in taken]
    trainer.box.ask(trained(retaken[0]), 5)
    again.close()
    assert [row["max_lag"] for row in read_lines(tmp_path / "ledger.jsonl")] == [2]
    assert [row["max_lag"] for row in read_lines(tmp_path / "metrics.jsonl") if "train_s" in row] == [2]


BOARD = """
class Board:
    def __init__(self, folder):
        self.file = (folder / "board.txt").open("a", buffering=1)

    def log(self, step, values):
        pass

    def table(self, name, columns, rows):
        self.file.writelines(f"{row[:2]} {row[4:]}\\n" for row in rows)
"""


def test_trackers_are_shown_a_steps_answers_once_however_often_it_is_taken(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answer_board.py").write_text(BOARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    stage = Stage(tmp_path, redis_url, trackers=("answer_board:Board",), tracker_samples=B + 1)
    judge_two_steps(stage)
    taken = [stage.trainer.box.ask(m.Take(step=step), 5) for step in (0, 0)]
    stage.trainer.box.ask(trained(taken[0]), 5)
    stage.close()
    again = Stage(tmp_path, redis_url, trackers=("answer_board:Board",), tracker_samples=B + 1)
    trainer = again.peer("trainer", "trainer")  # it has lost the version that step 0 has yielded
    taken += [trainer.box.ask(m.Take(step=step), 5) for step in (0, 1)]
    again.close()
    shown = (tmp_path / "board.txt").read_text().splitlines()
    rows = [(step, [group.number for group in batch.groups]) for step, batch in ((0, taken[0]), (1, taken[3]))]
    assert shown == [
        f"[{step}, {number}] [{reward}, {reward}, 'stop', 2, {step}]"
        for step, numbers in rows
        for number, reward in [*((number, 0.0) for number in numbers), (numbers[0], 1.0)]
    ]


def test_a_broker_that_was_killed_after_the_end_says_so_when_it_is_back(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.services.broker.service.LINGER_S", 0.5)
    one = settings(tmp_path, steps=1)
    stage = Stage(tmp_path, redis_url, steps=1)
    rollout = stage.rollout()
    reward = stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=100))
    for lease in rollout.leases(B):
        rollout.finish(lease)
    reward.score(B)
    trainer = stage.trainer.box
    batch = trainer.ask(m.Take(step=0), 5)
    metrics = {"reward": 0.5, "lag_max": 0.0, "lag_mean": 0.0, "tokens": 6.0, "tokens_lagging": 0.0}
    trainer.ask(trained(batch, metrics=metrics), 5)
    trainer.ask(m.Checkpointed(version=1, path="", final=True), 5)
    stage.close()
    assert stage.broker.state["phase"] == "done"
    time.sleep(0.3)
    again = Broker(one, redis_url)
    again.serve()  # nobody comes any more
    assert again.state["train_s"] == pytest.approx(stage.broker.state["train_s"], abs=0.01)
    assert again.state["phase"] == "done" and again.state["step"] == 1
    assert again.state["restarts"] == 0 and again.ledger_state.untrained == [], "it ended in good order"


def test_who_has_said_goodbye_and_comes_back_has_not_died(stage: Stage) -> None:
    first = stage.rollout()
    first.box.tell(m.Bye(reason="the run was stopped"))
    first.box.close()
    stage.peers.remove(first)
    deadline = time.monotonic() + 5
    while "rollout-0" in stage.broker.state["members"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stage.rollout(incarnation="2")
    assert stage.broker.state["restarts"] == 0
    stage.rollout(incarnation="3")
    assert stage.broker.state["restarts"] == 1


def test_an_unreachable_store_is_a_clear_error_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"store.url: no Redis answers at redis://127.0.0.1:1/0") as caught:
        Broker(settings(tmp_path, store=StoreConfig(retry_s=0.3)), "redis://:secret@127.0.0.1:1/0")
    assert "secret" not in str(caught.value)
