"""An engine whose weights lie in several processes: each receives by itself, and all load or none does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from penstock.protocols import keys, wire
from penstock.protocols import messages as m
from penstock.protocols.digests import Gmac
from penstock.protocols.mailbox import Mailbox
from penstock.services.weights.buffers import HostBuffer
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.receiver import receiver as module
from penstock.services.weights.receiver.receiver import Prepared
from penstock.services.weights.receiver.worker_desk import ReceivedVersion, WorkerDesk
from penstock.services.weights.receiver.worker_receiver import WorkerReceiver
from tests.weights.channel import CPU, Channel, Named, flip, until

ROWS = 301


def weights(seed: int) -> Named:
    generator = torch.Generator().manual_seed(seed)
    return [(f"w{i}", torch.randn(ROWS + i, 40, generator=generator)) for i in range(4)]


class Fleet:
    """A rollout whose engine has ``count`` workers. ``served``: what each had loaded, by version."""

    def __init__(self, address: str, name: str, config: WeightsConfig, count: int, joining: int | None = None) -> None:
        self.name, self.config = name, config
        self.box = Mailbox(address, name)
        self.desk = WorkerDesk(count, self.box, config)
        self.workers = [self.worker(index) for index in range(count if joining is None else joining)]
        self.served: dict[int, list[Mapping[str, torch.Tensor]]] = {}
        self.loaded: dict[int, m.Loaded] = {}
        self.box.ask(m.Hello(kind="rollout", name=name, host="", pid=1), 5)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def worker(self, index: int) -> WorkerReceiver:
        return WorkerReceiver(self.desk.address, f"{self.name}-worker-{index}", self.config, None, CPU)

    def _run(self) -> None:
        while (event := self.box.inbox.get()) is not None:
            if isinstance(event, Prepared):
                assert isinstance(event.weights, ReceivedVersion)
                taken = [worker.take(event.weights.epoch, event.weights.version) for worker in self.workers]
                self.served[event.weights.version] = [{n: t.clone() for n, t in one.items()} for one in taken]
                for worker in self.workers:
                    worker.done()
                self.loaded[event.loaded.version] = event.loaded
                event.swapped.set()
                self.box.ask_later(event.loaded, 5)

    def wait(self, version: int) -> list[Mapping[str, torch.Tensor]]:
        until(lambda: version in self.served, 20, f"{self.name} to serve version {version}; {sorted(self.served)}")
        return self.served[version]

    def close(self) -> None:
        self.box.tell(m.Bye(reason="over"))
        self.box.post(None)
        for worker in self.workers:
            worker.close()
        self.desk.close()
        self.box.close()


@pytest.fixture(params=["auto", "gloo", "snapshot"])
def channel(request: pytest.FixtureRequest) -> Iterator[Channel]:
    made = Channel(weights(0), transport=request.param, bucket_mb=0.01)
    yield made
    made.close()


def fleet(channel: Channel, count: int = 2, joining: int | None = None) -> Fleet:
    found = Fleet(channel.broker.address, f"rollout-{len(channel.rollouts)}#1", channel.config, count, joining)
    channel.rollouts.append(found)  # type: ignore[arg-type]
    if joining is None:
        until(lambda: channel.peer(found) is not None and channel.peer(found).transport, 5, "it to be reached")  # type: ignore[arg-type]
    return found


def same(found: list[Mapping[str, torch.Tensor]], seed: int) -> bool:
    return all(torch.equal(one[name], tensor) for one in found for name, tensor in weights(seed))


def become(channel: Channel, seed: int) -> None:
    for (_, mine), (_, other) in zip(channel.named, weights(seed), strict=True):
        mine.copy_(other)


def test_every_worker_gets_every_version_beside_others(channel: Channel) -> None:
    two, alone, three = fleet(channel), channel.join(), fleet(channel, 3)
    nbytes = channel.source.layout.nbytes
    for version in range(4):
        become(channel, version)
        channel.publish(version)
        assert same(two.wait(version), version) and same(three.wait(version), version)
        assert same([alone.wait(version)], version)
        channel.settled()
    assert len(two.served[2]) == 2 and len(three.served[2]) == 3
    wanted = {"auto": 0, "gloo": 2 * nbytes, "snapshot": nbytes}[channel.config.transport]
    assert two.loaded[2].bytes_received == wanted, "whatever is broadcast comes to each; each asks for its own share"
    epochs = [two.loaded[version].epoch for version in range(4)]
    assert len(set(epochs)) < 4, "the same members are the same epoch"  # whoever was late for one comes in another


def buffers(fleet: Fleet) -> list[int]:
    """Of what each worker serves."""
    held = [worker._receiver._serving for worker in fleet.workers]
    return [one.buffer.inode for one in held if one and isinstance(one.buffer, HostBuffer)]


@pytest.mark.parametrize("transport", ["gloo", "snapshot"])
def test_workers_of_one_machine_hold_a_version_once_and_each_proves_its_share(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = Channel(weights(0), transport=transport, bucket_mb=0.01)
    three = fleet(channel, 3)
    threads = {worker._receiver._thread: [0] for worker in three.workers}
    digest = Gmac.bucket

    def counted(gmac: Gmac, data: memoryview) -> str:
        threads.get(threading.current_thread(), [0])[0] += 1
        return digest(gmac, data)

    monkeypatch.setattr(Gmac, "bucket", counted)
    used = set()
    for version in range(3):
        become(channel, version)
        channel.publish(version)
        assert same(three.wait(version), version)
        channel.settled()
        until(lambda: len(buffers(three)) == 3 and len(set(buffers(three))) == 1, 5, "all to let go of the one before")
        used |= set(buffers(three))
    number = len(channel.source.layout.spans)
    assert len(used) == 2, "one that serves, and one for the next"
    assert sorted(made for (made,) in threads.values()) == sorted(3 * len(range(k, number, 3)) for k in range(3))
    channel.close()


@pytest.mark.parametrize("transport", ["gloo", "snapshot"])
def test_a_worker_of_another_machine_has_a_version_of_its_own(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Channel(weights(0), transport=transport, bucket_mb=0.01)
    two = fleet(channel, 3, joining=2)
    monkeypatch.setattr("penstock.services.weights.receiver.worker_receiver.neighbourhood", lambda: "elsewhere")
    two.workers.append(two.worker(2))
    for version in range(2):
        become(channel, version)
        channel.publish(version)
        assert same(two.wait(version), version)
        channel.settled()
    until(lambda: len(buffers(two)) == 3, 5, "all to serve")
    first, second, far = buffers(two)
    assert first == second != far
    channel.close()


def test_no_later_version_touches_the_one_that_a_worker_still_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the trainer's patience ends meanwhile, and whatever is given up."""
    channel = Channel(weights(0), transport="snapshot", bucket_mb=0.01, deadline_s=0.3)
    two, done = fleet(channel), WorkerReceiver.done
    quick, slow = two.workers
    loading: list[Mapping[str, torch.Tensor]] = []
    over = threading.Event()

    def waits(self: WorkerReceiver) -> None:
        if self is slow and not over.is_set():
            assert slow._ready
            loading.append(slow.take(slow._ready.loaded.epoch, 0))
            assert over.wait(20)
        done(self)

    monkeypatch.setattr(WorkerReceiver, "done", waits)
    channel.publish(0)
    until(lambda: loading, 5, "the slow one to load")
    for version in (1, 2, 3):
        become(channel, version)
        channel.publish(version)
        until(lambda at=version: quick._ready and quick._ready.loaded.version >= at, 10, f"{version} to come")
        assert same(loading, 0), f"version {version} is where version 0 is read"
    over.set()
    assert same(two.wait(3), 3)
    channel.close()


@pytest.mark.parametrize("transport", ["gloo", "snapshot"])
def test_changes_are_made_of_the_version_that_all_have(transport: str) -> None:
    named = [("w", 0.02 * torch.randn(300, 200, generator=torch.Generator().manual_seed(1)))]
    channel = Channel(named, dtype="bfloat16", transport=transport, bucket_mb=0.01)
    two = fleet(channel)
    for version in range(4):
        named[0][1].add_(1e-6)
        channel.publish(version)
        served = two.wait(version)
        assert all(torch.equal(one["w"], named[0][1].bfloat16()) for one in served)
        channel.settled()
    nbytes = channel.source.layout.nbytes
    whole, last = (two.loaded[version].bytes_received for version in (0, 3))
    assert whole == nbytes * (2 if transport == "gloo" else 1) and last < whole / 5
    assert not two.loaded[3].buckets_again
    channel.close()


def test_no_byte_passes_the_rollouts_process(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it hears and says is of the size of a manifest."""
    passed = []
    send = WorkerDesk._handle

    def counted(desk: WorkerDesk, identity: str, message: m.Message) -> None:
        passed.append(sum(len(frame) for frame in wire.encode(m.to_envelope(message))))
        send(desk, identity, message)

    monkeypatch.setattr(WorkerDesk, "_handle", counted)
    two = fleet(channel)
    passed.clear()
    channel.publish(0)
    assert same(two.wait(0), 0)
    assert 0 < sum(passed) < channel.source.layout.nbytes / 10
    assert not hasattr(two.desk, "_serving"), "it holds no version"


def test_one_workers_flipped_bucket_costs_that_bucket(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    two = fleet(channel)
    hit = flip(monkeypatch, [worker._receiver for worker in two.workers], 1)
    channel.publish(0)
    assert same(two.wait(0), 0) and hit
    if channel.config.transport != "snapshot":
        assert two.loaded[0].buckets_again == 1


def test_a_version_that_one_worker_cannot_load_is_loaded_by_none(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = fleet(channel)
    channel.publish(0)
    two.wait(0)
    channel.settled()
    broken, settle = two.workers[1]._receiver, module.Receiver._settle

    def fails(self: module.Receiver, *arguments: object) -> object:
        if self is broken:
            raise OSError("no memory is left")
        return settle(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module.Receiver, "_settle", fails)
    become(channel, 1)
    channel.publish(1)

    def refused() -> bool:
        said = [failure.error for failure in channel.broker.failures]
        return any("worker rollout-0#1-worker-1" in error or "no memory" in error for error in said)

    until(refused, 10, "the refusal")
    assert 1 not in two.served
    monkeypatch.setattr(module.Receiver, "_settle", settle)
    assert same(two.wait(1), 1), "offered again"


def test_a_proposal_that_is_said_twice_is_the_same_one(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    two = fleet(channel)
    channel.publish(0)
    two.wait(0)
    channel.settled()
    handle = WorkerDesk._handle

    def twice(self: WorkerDesk, identity: str, message: m.Message) -> None:
        handle(self, identity, message)
        if isinstance(message, m.Propose):  # as where the broker was away for a while
            handle(self, identity, message)

    monkeypatch.setattr(WorkerDesk, "_handle", twice)
    become(channel, 1)
    channel.publish(1)
    assert same(two.wait(1), 1) and not channel.broker.failures


def test_a_worker_slower_than_the_trainers_patience_costs_that_offer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are ready, and must not wait for it for ever."""
    channel = Channel(weights(0), transport="snapshot", bucket_mb=0.01, deadline_s=1.0)
    two = fleet(channel)
    channel.publish(0)
    two.wait(0)
    slow, settle, stalled = two.workers[1]._receiver, module.Receiver._settle, threading.Event()

    def late(self: module.Receiver, *arguments: object) -> object:
        if self is slow and not stalled.is_set():
            stalled.set()
            time.sleep(2.5)
        return settle(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module.Receiver, "_settle", late)
    become(channel, 1)
    channel.publish(1)
    assert same(two.wait(1), 1) and stalled.is_set(), "offered again"
    channel.close()


def test_a_fleet_is_reached_when_its_last_worker_has_come(channel: Channel) -> None:
    late = fleet(channel, 2, joining=1)
    channel.publish(0)
    until(lambda: channel.peer(late), 5, "the trainer to hear of it")  # type: ignore[arg-type]
    assert not channel.peer(late).transport  # type: ignore[arg-type]
    late.workers.append(late.worker(1))
    assert same(late.wait(0), 0), "and is seeded then"


def test_workers_speak_under_the_runs_keys(tmp_path: Path) -> None:
    keys.make(tmp_path)
    client = keys.load_client(tmp_path / "client.json")
    box = Mailbox("tcp://127.0.0.1:1", "rollout-0#1", client)
    desk = WorkerDesk(1, box, WeightsConfig(), client)
    worker = WorkerReceiver(desk.address, "worker", WeightsConfig(), client, CPU)
    assert len(desk._workers) == 1
    stranger = Mailbox(desk.address, "stranger#1")
    with pytest.raises(TimeoutError):
        stranger.ask(m.Hello(kind="worker", name="stranger", host="", pid=1), 1.0)
    for each in (worker, desk, stranger, box):
        each.close()
