"""Trainer's publisher to rollouts' receivers, by every way that exists on a CPU."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from penstock.protocols import messages as m
from penstock.protocols.cut import Cut
from penstock.protocols.free_port import lasting_ports
from penstock.protocols.mailbox import Mailbox
from penstock.protocols.versions import CollectiveRoute, DigestError, SnapshotRoute
from penstock.services.weights.buffers import HostBuffer, Mappings
from penstock.services.weights.byte_views import as_array, from_memory
from penstock.services.weights.layout import make_layout
from penstock.services.weights.parts import packed, runs_of
from penstock.services.weights.queues import current_queue
from penstock.services.weights.receiver.canary import CanaryError, check_canary
from penstock.services.weights.receiver.loader import MappedVersion
from penstock.services.weights.receiver.receiver import Prepared
from penstock.services.weights.sender import broadcast
from penstock.services.weights.sender import publisher as publisher_module
from penstock.services.weights.sender.publication import Publication
from penstock.services.weights.sender.publisher import Publisher
from penstock.services.weights.sender.snapshot import Snapshot
from penstock.services.weights.transports import shared_memory
from penstock.services.weights.transports.broadcast_group import BroadcastGroup, serve_store
from penstock.services.weights.transports.bucket_server import BucketClient, BucketServer, bucket_reply
from penstock.services.weights.transports.shared_memory import SEGMENTS
from tests.weights.channel import Channel, Holder, Named, flip, score, until

PLACE = m.Place(nonce="", host="127.0.0.1")


def weights(seed: int) -> Named:
    generator = torch.Generator().manual_seed(seed)
    return [(f"w{i}", torch.randn(37 + i, 11, generator=generator)) for i in range(5)]


def become(channel: Channel, seed: int) -> None:
    for (_, mine), (_, other) in zip(channel.named, weights(seed), strict=True):
        mine.copy_(other)


def same(found: dict[str, torch.Tensor], seed: int, dtype: torch.dtype = torch.float32) -> bool:
    return all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in weights(seed))


@pytest.fixture(params=["auto", "gloo", "snapshot"])
def channel(request: pytest.FixtureRequest) -> Iterator[Channel]:
    made = Channel(weights(0), transport=request.param)
    yield made
    made.close()


@pytest.fixture
def shared() -> Iterator[Channel]:
    made = Channel(weights(0))
    yield made
    made.close()


def test_every_receiver_gets_every_bit_and_a_late_one_is_served_at_once(channel: Channel) -> None:
    first, second = channel.join(), channel.join()
    for version in (0, 1, 2):
        become(channel, version)
        channel.publish(version)
        assert same(first.wait(version), version) and same(second.wait(version), version)
    assert same(channel.join(ready=False).wait(2), 2)


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_seed_that_takes_longer_than_a_step_comes_through(transport: str) -> None:
    channel = Channel(weights(0), transport=transport)
    try:
        first = channel.join()
        channel.publish(0)
        first.wait(0)
        port, asked, on = channel.publisher._snapshots, threading.Event(), threading.Event()
        answer = port._answer

        def slow(fetch: m.Fetch) -> m.Message:
            asked.set()
            assert on.wait(10)
            return answer(fetch)

        port._answer = slow
        late = channel.join(ready=False, transport="snapshot")
        assert asked.wait(10), "the seed begins"
        for version in (1, 2, 3):
            become(channel, version)
            channel.publish(version)
            first.wait(version)
            until(lambda: channel.peer(first).loading is None, 5, "its answer")  # else it is seeded, too
        on.set()
        assert same(late.wait(3), 3)
        assert sorted(late.served) == [0, 3], "what it had begun with, and then the latest"
        assert same(late.served[0], 0) and not channel.broker.failures
        become(channel, 4)
        channel.publish(4)
        assert same(late.wait(4), 4) and same(first.wait(4), 4)
    finally:
        channel.close()


def test_the_model_may_change_as_soon_as_it_was_read(channel: Channel) -> None:
    rollout = channel.join()
    for version in range(6):
        become(channel, version)
        channel.publish(version)
        become(channel, 99)
    rollout.wait(5)
    assert all(same(found, version) for version, found in rollout.served.items())


def test_a_version_that_changes_nothing_is_a_version_all_the_same(channel: Channel) -> None:
    rollout = channel.join()
    for version in (0, 1):
        channel.publish(version)
        assert same(rollout.wait(version), 0)


def test_what_is_offered_again_while_the_engine_ends_what_it_has_is_loaded_once() -> None:
    channel, held = Channel(weights(0), deadline_s=0.5), list[Prepared]()
    try:
        rollout = channel.join()
        answers, say = list[m.Loaded](), rollout.box.ask_later

        def heard(message: Any, deadline_s: float) -> Any:
            answers.extend([message] if isinstance(message, m.Loaded) else [])
            return say(message, deadline_s)

        rollout.box.ask_later = heard  # type: ignore[method-assign]
        rollout.receiver._deliver = held.append
        channel.publish(0)
        until(lambda: held and channel.peer(rollout).late and channel.peer(rollout).loading, 10, "it to be seeded")
        rollout.receiver._deliver = lambda ready: (held.append(ready), rollout.box.post(ready))  # type: ignore[func-returns-value]
        rollout.box.post(held[0])
        until(lambda: len(answers) == 2, 10, "the answer to the second offer")
        assert [ready.loaded.version for ready in held] == [0] and answers[0].epoch < answers[1].epoch
        channel.settled()
        assert channel.peer(rollout).slowest_s > 0.5, "it is known how long it takes"
        become(channel, 1)
        channel.publish(1)
        assert same(rollout.wait(1), 1)
    finally:
        channel.close()


def test_a_receiver_that_never_answers_does_not_hold_up_the_others(channel: Channel) -> None:
    first, second = channel.join(), channel.join()
    channel.publish(0)
    first.wait(0), second.wait(0)
    channel.broker.muted.add(second.name)
    become(channel, 1)
    started = time.monotonic()
    channel.publish(1)
    assert same(first.wait(1, 10), 1)
    assert time.monotonic() - started < channel.config.stall_s + 2
    become(channel, 2)
    channel.publish(2)  # in an epoch without it
    assert same(first.wait(2, 2), 2)
    channel.broker.muted.clear()
    assert same(second.wait(2, 20), 2), "voted out, invited again, and seeded"


def test_who_stays_away_from_a_broadcast_is_named_and_the_others_get_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel, said = Channel(weights(0), transport="gloo"), structlog.testing.CapturingLogger()
    monkeypatch.setattr(broadcast, "log", said)
    first, second = channel.join(), channel.join()
    channel.broker.muted.add(second.name)
    channel.publish(0)
    assert same(first.wait(0), 0)
    (broke,) = said.calls
    assert f"within 3 s; members: rank 1 ({first.name}), rank 2 ({second.name})" in broke.kwargs["error"]
    channel.close()


def test_mixed_receivers_in_one_epoch() -> None:
    port, seen = lasting_ports()[0], {}
    outside = f"tcp://localhost:{port}"  # as who is not on the weight network knows it
    channel = Channel(weights(0), dtype="bfloat16", snapshot_port=port, snapshot_advertise=outside)
    rollouts = [channel.join(), channel.join(transport="gloo"), channel.join(transport="snapshot")]
    rollouts.append(channel.join(transport="gloo"))
    for version in range(4):
        become(channel, version)
        channel.publish(version)
        for rollout in rollouts:
            assert same(rollout.wait(version), version, torch.bfloat16)
        channel.settled()
    assert [rollout.loaded[3].transport for rollout in rollouts] == ["shm", "gloo", "snapshot", "gloo"]
    for rollout in rollouts:
        line = rollout.receiver._snapshots
        seen[rollout.loaded[3].transport] = line and line.address
    assert seen["snapshot"] == outside and seen["gloo"] in (None, f"tcp://127.0.0.1:{port}")
    assert len({rollout.loaded[3].epoch for rollout in rollouts}) == 1
    assert rollouts[0].loaded[3].epoch == rollouts[0].loaded[2].epoch, "the same members are the same epoch"
    channel.close()


def test_the_version_serves_where_it_lies(shared: Channel) -> None:
    rollout = shared.join()
    shared.publish(0)
    rollout.wait(0)
    assert rollout.loaded[0].transport == "shm" and rollout.loaded[0].bytes_received == 0
    kept = rollout.in_place
    for version in range(1, 8):
        become(shared, version)
        shared.publish(version)
        rollout.wait(version)
        assert same(dict(rollout.in_place), version)
    assert kept["w0"].data_ptr() != rollout.in_place["w0"].data_ptr()


def test_no_segment_is_written_while_somebody_serves_from_it(shared: Channel) -> None:
    """A receiver that was stopped for long still serves what it served."""
    stopped, other = shared.join(), shared.join()
    shared.publish(0)
    stopped.wait(0), other.wait(0)
    shared.broker.muted.add(stopped.name)
    for version in range(1, 3 * SEGMENTS):
        become(shared, version)
        shared.publish(version)
        other.wait(version)
    assert same(dict(stopped.in_place), 0)


def test_segments_do_not_pile_up(shared: Channel) -> None:
    rollout = shared.join()
    for version in range(3 * SEGMENTS):
        shared.publish(version)
        rollout.wait(version)
    mine = f"{shared_memory._prefix(shared.run_key)}*"
    assert len([p for p in shared_memory.directory().glob(mine) if "probe" not in p.name]) <= SEGMENTS
    shared.publisher.close()
    assert not [p for p in shared_memory.directory().glob(mine) if "probe" not in p.name]


def test_names_in_shared_memory_that_vanish_cost_nobody_a_version(shared: Channel) -> None:
    """Whoever cleans up takes them: logind (RemoveIPC), or somebody's rm. Another start of the run does not."""
    rollout = shared.join()
    shared.publish(0)
    rollout.wait(0)
    shared.settled()
    mine = f"{shared_memory._prefix(shared.run_key)}*"
    before = set(shared_memory.directory().glob(mine))
    shared_memory.remove_leftovers(shared.run_key)
    assert set(shared_memory.directory().glob(mine)) == before, "a run that lives keeps its names"
    for path in before:
        path.unlink()
    late = shared.join()
    assert same(late.wait(0), 0)
    for version in range(1, 4):
        become(shared, version)
        shared.publish(version)
        for each in (rollout, late):
            assert same(each.wait(version), version) and each.loaded[version].transport == "shm"
    assert not shared.broker.failures
    shared.publisher.close()
    assert not list(shared_memory.directory().glob(mine))


def test_who_does_not_see_the_nonce_is_not_served_by_shared_memory(
    shared: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "read_probe", lambda name: "")
    rollout = shared.join()
    shared.publish(0)
    assert same(rollout.wait(0), 0) and rollout.loaded[0].transport == "gloo"


def test_bf16_on_the_wire_is_the_cast_of_the_master_copy() -> None:
    channel = Channel(weights(0), "bfloat16")
    rollout = channel.join()
    channel.publish(0)
    assert same(rollout.wait(0), 0, torch.bfloat16)
    channel.close()


@pytest.mark.parametrize("transport", ["gloo", "snapshot"])
def test_changes_are_sent_where_that_is_less_and_the_result_is_the_same(transport: str) -> None:
    torch.manual_seed(0)
    named = [("w", 0.02 * torch.randn(300, 200))]
    channel = Channel(named, "bfloat16", transport=transport, full_every=5, bucket_mb=0.05)
    rollout = channel.join()
    sizes = []
    for version in range(1, 8):
        named[0][1].add_(1e-6 * torch.randn(300, 200).sign())
        channel.publish(version)
        assert torch.equal(rollout.wait(version)["w"], named[0][1].bfloat16())
        sizes.append(rollout.loaded[version].bytes_received)
        channel.settled()
    whole = channel.source.layout.nbytes
    assert sizes[0] == sizes[4] == whole, "the first and every full_every-th are sent whole"
    if transport == "gloo":
        assert sizes[1] == channel.broker.costs[2].bytes_sent + 16 * len(channel.source.layout.spans), "and a head each"
    assert all(size < whole / 20 for index, size in enumerate(sizes) if index not in (0, 4)), sizes
    assert 0 < channel.broker.costs[7].density < 0.1
    channel.close()


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_corrupted_bucket_is_sent_again_and_never_served(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Channel(weights(0), transport=transport)
    rollout = channel.join()
    hit = flip(monkeypatch, [rollout.receiver], 2)
    channel.publish(0)
    assert same(rollout.wait(0), 0)
    assert len(hit) == 2 and rollout.loaded[0].buckets_again == 2
    channel.close()


def test_a_version_that_stays_corrupted_is_never_served_and_is_offered_again(shared: Channel) -> None:
    rollout = shared.join()
    shared.publish(0)
    rollout.wait(0)
    become(shared, 1)
    damage = Damage(shared)
    shared.publish(1)
    until(lambda: shared.broker.failures, 10, "a refusal")
    assert 1 not in rollout.served and "buckets 0 are missing or wrong" in shared.broker.failures[0].error
    damage.mend()
    assert same(rollout.wait(1), 1)


class Damage:
    """Flips a bit of the segment after it was hashed and before its receivers look."""

    def __init__(self, channel: Channel) -> None:

        original = channel.publisher._finish
        self.snapshot: Snapshot | None = None

        def finish(snapshot: Snapshot) -> None:
            self.snapshot = snapshot
            snapshot.buffer.tensor[5] ^= 1
            assert snapshot.buffer.name
            original(snapshot)

        segment_filled = HostBuffer.filled

        def filled(segment: HostBuffer, buckets: int) -> None:
            pass  # receivers see the buckets only once they are damaged

        def finish_and_fill(snapshot: Snapshot) -> None:
            finish(snapshot)
            HostBuffer.filled = segment_filled  # type: ignore[method-assign]
            snapshot.buffer.filled(len(snapshot.layout.spans))

        HostBuffer.filled = filled  # type: ignore[method-assign]
        channel.publisher._finish = finish_and_fill  # type: ignore[method-assign]
        self._channel, self._original = channel, original

    def mend(self) -> None:
        assert self.snapshot
        self.snapshot.buffer.tensor[5] ^= 1
        self._channel.publisher._finish = self._original  # type: ignore[method-assign]


def test_an_engine_that_makes_something_else_of_right_bytes_does_not_serve_it(shared: Channel) -> None:
    class Careless(Holder):
        """Loses a part of a fused matrix, as engines do."""

        careless = True

        def prepare(
            self, weights: Mapping[str, torch.Tensor], memory: MappedVersion | None = None
        ) -> dict[str, torch.Tensor]:
            made = {name: tensor.clone() for name, tensor in weights.items()}
            if self.careless:
                made["w1"][3:] = 0
            return made

    engine = Careless()
    careless, sound = shared.join(engine=engine), shared.join()
    tokens = [1, 2, 3]
    canary = m.Canary(tokens=tokens, logprobs=score(dict(weights(0)), tokens).tolist(), tolerance=1e-4)
    shared.publish(0, canary)
    assert same(sound.wait(0), 0)
    until(lambda: shared.broker.failures, 10, "a refusal")
    assert 0 not in careless.served and "canary's log-probabilities differ" in shared.broker.failures[0].error
    engine.careless = False
    assert same(careless.wait(0), 0)


def test_every_replica_of_an_engine_is_asked() -> None:
    class Replicas(Holder):
        wrong = 0.0

        def score(self, prepared: Any, tokens: np.ndarray) -> np.ndarray:
            found = super().score(prepared, tokens)
            return np.stack([found, found + self.wrong])

    engine, tokens, loaded = Replicas(), [1, 2, 3], dict(weights(0))
    canary = m.Canary(tokens=tokens, logprobs=score(loaded, tokens).tolist(), tolerance=1e-4)
    assert check_canary(engine, loaded, canary) == 0
    engine.wrong = 0.5
    with pytest.raises(CanaryError, match="differ by 0.5"):
        check_canary(engine, loaded, canary)


def test_buckets_that_came_are_let_go_of_while_others_are_fetched() -> None:
    data = np.arange(40 * 1024, dtype=np.uint8)
    layout = make_layout({"w": (20, 1024)}, "bfloat16", bucket_bytes=1024)
    held: list[weakref.ref[Any]] = []

    def answer(fetch: m.Message) -> m.Message:
        assert isinstance(fetch, m.Fetch)
        start, end = layout.spans[fetch.index]
        return bucket_reply(0, fetch.index, memoryview(data)[start:end], None)

    def arrived(bucket: m.Bucket, _: np.ndarray) -> None:
        held.append(weakref.ref(bucket))
        assert sum(one() is not None for one in held) <= 2

    server = BucketServer("127.0.0.1", 0, None, answer)
    client = BucketClient(server.address, "rollout-0#1", None)
    assert client.fetch(0, "", layout, list(range(40)), None, arrived, 5) == data.nbytes and len(held) == 40
    client.close()
    server.close()


def test_a_proposal_of_a_layout_that_nobody_was_invited_with_is_refused(shared: Channel) -> None:
    rollout = shared.join()
    rollout.receiver.handle(
        m.Propose(
            targets=[rollout.name],
            epoch=2**50,
            version=7,
            layout="0" * 32,
            route=SnapshotRoute(),
            snapshots="tcp://x:1",
        )
    )
    until(lambda: shared.broker.failures, 5, "the refusal")
    assert "has layout 00000000000000000000000000000000" in shared.broker.failures[0].error
    assert rollout.served == {}


def test_an_answer_to_an_earlier_trainers_invitation_counts_for_nothing(shared: Channel) -> None:
    box = Mailbox(shared.broker.address, "rollout-9#1")
    try:
        box.ask(m.Hello(kind="rollout", name="rollout-9", host="", pid=1), 5)
        invited = box.inbox.get(timeout=5)
        assert isinstance(invited, m.Invite)
        peer = shared.publisher.peers["rollout-9#1"]
        box.ask(m.Reach(layout="0" * 32, places=[PLACE]), 5)
        box.ask(m.Bye(reason="the trainer has handled what came before"), 5)
        until(lambda: "rollout-9#1" not in shared.publisher.peers, 5, "the goodbye")
        assert peer.transport is None

        def reached() -> str | None:
            known = shared.publisher.peers.get("rollout-9#1")
            return known.transport if known else None

        box.ask(m.Hello(kind="rollout", name="rollout-9", host="", pid=1), 5)
        box.ask(m.Reach(layout=invited.layout.digest, places=[PLACE]), 5)
        until(lambda: reached() == "gloo", 5, "the rollout to be reached")
    finally:
        box.close()


def test_a_trainer_whose_clock_is_behind_is_understood(shared: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = shared.join()
    shared.publish(0)
    rollout.wait(0)
    shared.settled()
    shared.publisher.close()
    shared.box.close()
    hour_ago = time.time_ns() - 3600 * 10**9
    monkeypatch.setattr(publisher_module.time, "time_ns", lambda: hour_ago)
    shared.box = Mailbox(shared.broker.address, "trainer#2")
    shared.publisher = Publisher(shared.config, shared.source, shared.run_key, shared.box)
    shared.box.ask(m.Hello(kind="trainer", name="trainer", host="", pid=1), 5)
    until(lambda: shared.peer(rollout) is not None and shared.peer(rollout).transport, 5, "the rollout to be reached")
    become(shared, 1)
    shared.publish(1)
    rollout.wait(1, 3)


def test_a_version_can_be_asked_for_as_soon_as_rollouts_hear_of_it(shared: Channel) -> None:
    """The trainer learns later than they that the broker has passed its commit on."""
    found: list[m.Message] = []

    def commit(snapshot: Snapshot, version: m.CommitVersion | None) -> Future[m.Message]:
        asked = m.Fetch(version=snapshot.version, digest=snapshot.digest, index=0, held="")
        found.append(shared.publisher._answer_fetch(asked))
        found.append(shared.publisher._answer_fetch(asked.model_copy(update={"version": snapshot.version + 1})))
        done: Future[m.Message] = Future()
        done.set_result(m.Relayed(absent=[]))
        return done

    shared.publish(0)
    shared.publisher.publish(Publication(1, commit=commit)).committed.result(10)
    assert isinstance(found[0], m.Bucket) and found[0].version == 1
    assert isinstance(found[1], m.Refused) and "version 2 is not here yet" in found[1].reason


def test_a_late_joiner_waits_for_nobody_and_takes_part_from_the_next_epoch(channel: Channel) -> None:
    first = channel.join()
    channel.publish(0)
    first.wait(0)
    second, third = channel.join(ready=False), channel.join(ready=False)
    second.wait(0), third.wait(0)
    channel.settled()
    for version in range(1, 6):  # on a busy machine some may still be seeded while the first of them are published
        become(channel, version)
        channel.publish(version)
        for rollout in channel.rollouts:
            assert same(rollout.wait(version), version)
        channel.settled()
        if len({rollout.loaded[version].epoch for rollout in channel.rollouts}) == 1:
            return
    raise AssertionError("they never met in one epoch")


@pytest.mark.parametrize("name", ["../etc/passwd", "other-thing", f"{shared_memory.PREFIX}missing"])
def test_foreign_segments_are_refused(name: str) -> None:
    with pytest.raises(DigestError):
        Mappings().attach(name, 10)


def test_a_segment_that_is_read_is_not_begun_and_one_of_another_version_is_refused() -> None:
    segment = HostBuffer(4096, name=shared_memory.new_name("test-locks"))
    assert segment.begin(1)
    segment.filled(3)
    reader = Mappings().attach(segment.name, 4096)
    assert reader.filled(1) == 3
    with pytest.raises(DigestError, match="holds version 1, not 2"):
        reader.filled(2)
    assert not segment.begin(2)
    reader.release()
    assert segment.begin(2)
    segment.unlink()


def test_families_of_projections_lie_side_by_side() -> None:
    shapes: dict[str, Any] = {}
    for part in ("q_proj", "k_proj", "v_proj"):
        shapes |= {f"l.self_attn.{part}.weight": (8, 32), f"l.self_attn.{part}.bias": (8,)}
    shapes |= {"l.mlp.up_proj.weight": (16, 32), "l.mlp.gate_proj.weight": (16, 32), "norm": (32,)}
    names = [weight.name for weight in make_layout(shapes, "float32").weights]
    assert names[:3] == [f"l.self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj")]
    assert names.index("l.mlp.gate_proj.weight") + 1 == names.index("l.mlp.up_proj.weight")
    assert sorted(names) == sorted(shapes)


def test_a_read_only_buffer_makes_no_noise() -> None:
    data = bytes(range(64))
    assert from_memory(memoryview(data)).tolist() == list(data)
    assert np.array_equal(as_array(memoryview(data)), np.arange(64))


def test_a_process_ends_in_good_order_while_a_thread_waits_for_a_broadcast() -> None:
    waiting = """
        import threading, time, torch
        from penstock.protocols.versions import CollectiveRoute, Layout
        from penstock.services.runtime.actor import end
        from penstock.services.weights.transports.broadcast_group import BroadcastGroup, serve_store
        store, address = serve_store("127.0.0.1")
        route = CollectiveRoute(type="gloo", store=address, ranks={"rollout-0#1": 1}, size=2, stall_s=20)
        groups = {}
        sender = threading.Thread(target=lambda: groups.update(sender=BroadcastGroup(route, 0, 0, "127.0.0.1", store)))
        sender.start()
        group = BroadcastGroup(route, 0, 1, "127.0.0.1")
        sender.join()
        where, shadow = Layout(weights=(), nbytes=4096, bucket_bytes=4096), torch.zeros(4096, dtype=torch.uint8)
        threading.Thread(target=group.receive, args=(where, shadow, print), daemon=True).start()
        time.sleep(0.3)
        end(0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(waiting)], check=True, timeout=15)


def test_padding_that_no_rank_sends_is_zero_where_room_is_used_again() -> None:
    shapes = {f"l{i}.{name}": shape for i in range(6) for name, shape in (("sinks", (14,)), ("w", (32, 32)))}
    layout, cut = make_layout(shapes, "bfloat16", 1024), Cut(shards=2)
    assert any(weight.nbytes % 64 for weight in layout.weights)
    version = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for weight in layout.weights:
        version[weight.offset : weight.offset + weight.nbytes] = torch.randint(1, 255, (weight.nbytes,)).byte()
    runs = runs_of(layout, cut)
    store, address = serve_store("127.0.0.1")
    route = CollectiveRoute(type="gloo", store=address, ranks={"rollout-0#1": 2}, size=3, cut=cut, stall_s=10)

    def send(rank: int) -> None:
        group = BroadcastGroup(route, 1, rank, "127.0.0.1", store if rank == 0 else None)
        spans = layout.spans

        def mine(index: int) -> torch.Tensor:
            return packed(version[spans[index][0] : spans[index][1]], runs[index][rank])

        group.exchange(runs, mine, current_queue(torch.device("cpu")), lambda: None)

    found, room = torch.zeros_like(version), [torch.full((1024,), 0xAB, dtype=torch.uint8) for _ in range(8)]

    def bucket(index: int) -> torch.Tensor:
        start, end = layout.spans[index]
        return room[index % len(room)][: end - start]

    def arrived(index: int) -> None:
        start, end = layout.spans[index]
        found[start:end] = bucket(index)

    with ThreadPoolExecutor(2) as pool:
        sending = [pool.submit(send, rank) for rank in range(2)]
        BroadcastGroup(route, 1, 2, "127.0.0.1").receive(layout, bucket, arrived)
        for one in sending:
            one.result(20)
    assert torch.equal(found, version)
