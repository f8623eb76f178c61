"""Trainer's publisher to rollouts' receivers, through real processes of the host's memory and of gloo."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from protocols import messages as m
from protocols.mailbox import Exchange, Mailbox
from protocols.weights import DigestError
from services.rollout.receiver import Prepared, Receiver
from services.trainer.publisher import SEGMENTS, Publisher
from services.weights import shm
from services.weights.config import WeightsConfig


class Holder:
    """The part of an engine that a receiver uses."""

    version = -1

    def prepare(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in weights.items()}


class Routing:
    """A broker that only routes weights: tells the trainer who is there, and passes offers and answers on."""

    def __init__(self) -> None:
        self.exchange = Exchange("tcp://127.0.0.1:0")
        self.serves: dict[str, tuple[int, str]] = {}
        self.muted: set[str] = set()
        self.open = True
        self.changed = True
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        trainer = None
        while self.open:
            for identity, request, message in self.exchange.receive(0.02):
                if isinstance(message, m.Hello) and message.kind == "trainer":
                    trainer, self.changed = identity, True
                elif isinstance(message, m.Hello):
                    self.serves[identity], self.changed = (-1, ""), True
                elif isinstance(message, m.Bye):
                    self.serves.pop(identity, None)
                    self.changed = True
                elif isinstance(message, m.Publish):
                    for target in message.targets:
                        if target not in self.muted:
                            offer = m.Offer(version=message.version, manifest=message.manifest, route=message.route)
                            self.exchange.send(target, offer)
                elif isinstance(message, m.Loaded):
                    self.serves[identity], self.changed = (message.version, message.digest), True
                elif isinstance(message, m.LoadFailed) and trainer:
                    report = m.ReceiverReport(receiver=identity, version=message.version, error=message.error)
                    self.exchange.send(trainer, report)
                self.exchange.send(identity, m.Noted(), request)
            if self.changed and trainer:
                self.changed = False
                self.exchange.send(trainer, m.Receivers(serves=dict(self.serves)))
            self.exchange.flush()


class Rollout:
    """A receiver with its mailbox; ``served`` is what it swapped in, by version."""

    def __init__(self, address: str, name: str) -> None:
        self.box = Mailbox(address, name)
        self.box.ask(m.Hello(kind="rollout", name=name, host="", pid=1), 5)
        self.receiver = Receiver(Holder(), self.box, name, "127.0.0.1")  # type: ignore[arg-type]
        self.served: dict[int, dict[str, torch.Tensor]] = {}
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            event = self.box.inbox.get()
            if event is None:
                return
            if isinstance(event, m.Offer):
                self.receiver.offer(event)
            elif isinstance(event, Prepared):
                self.served[event.version] = event.weights
                event.swapped.set()
                loaded = m.Loaded(version=event.version, digest=event.digest, receive_s=0, verify_s=0, pause_s=0)
                self.box.ask_later(loaded, 5)

    def wait(self, version: int, seconds: float = 20) -> dict[str, torch.Tensor]:
        deadline = time.monotonic() + seconds
        while version not in self.served and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.served[version]

    def close(self) -> None:
        self.box.tell(m.Bye(reason="over"))
        self.box.post(None)
        self.receiver.close()
        self.box.close()


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    return [(f"w{i}", torch.randn(37 + i, 11, generator=generator)) for i in range(5)]


class Channel:
    def __init__(self, transport: str, dtype: str = "float32", deadline_s: float = 5) -> None:
        self.routing = Routing()
        self.box = Mailbox(self.routing.exchange.address, "trainer#1")
        config = WeightsConfig.model_validate({"transport": transport, "deadline_s": deadline_s, "bucket_mb": 0.002})
        self.publisher = Publisher(config, dtype, f"test-{id(self)}", self.box)
        self.box.ask(m.Hello(kind="trainer", name="trainer", host="", pid=1), 5)
        self.rollouts: list[Rollout] = []

    def join(self) -> Rollout:
        rollout = Rollout(self.routing.exchange.address, f"rollout-{len(self.rollouts)}#1")
        self.rollouts.append(rollout)
        return rollout

    def publish(self, version: int) -> None:
        self.publisher.publish(self.publisher.stage(version, weights(version)))

    def close(self) -> None:
        for rollout in self.rollouts:
            rollout.close()
        self.publisher.close()
        self.box.close()
        self.routing.open = False
        self.routing.thread.join()
        self.routing.exchange.close()


@pytest.fixture(params=["shm", "gloo"])
def channel(request: pytest.FixtureRequest) -> Iterator[Channel]:
    made = Channel(request.param)
    yield made
    made.close()


def same(found: dict[str, torch.Tensor], version: int, dtype: torch.dtype = torch.float32) -> bool:
    return all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in weights(version))


def test_every_receiver_gets_every_bit_and_a_late_one_is_served_at_once(channel: Channel) -> None:
    first, second = channel.join(), channel.join()
    for version in (0, 1, 2):
        channel.publish(version)
        assert same(first.wait(version), version) and same(second.wait(version), version)
    assert same(channel.join().wait(2), 2)


def test_a_version_that_changes_nothing_is_a_version_all_the_same(channel: Channel) -> None:
    rollout = channel.join()
    channel.publish(0)
    rollout.wait(0)
    channel.publisher.publish(channel.publisher.stage(1, weights(0)))
    assert same(rollout.wait(1), 0)


def test_a_receiver_that_never_answers_does_not_hold_up_the_others(channel: Channel) -> None:
    first, second = channel.join(), channel.join()
    channel.publish(0)
    first.wait(0), second.wait(0)
    channel.routing.muted.add("rollout-1#1")
    channel.publish(1)
    time.sleep(0.2)
    channel.routing.serves.pop("rollout-1#1")  # the broker finds it dead
    channel.routing.changed = True
    assert same(first.wait(1, 30), 1)


def test_bf16_on_the_wire_is_the_cast_of_the_master_copy() -> None:
    channel = Channel("shm", "bfloat16")
    rollout = channel.join()
    channel.publish(0)
    assert same(rollout.wait(0), 0, torch.bfloat16)
    channel.close()


def test_a_corrupted_version_is_never_served_and_is_offered_again() -> None:
    channel = Channel("shm")
    rollout = channel.join()
    snapshot = channel.publisher.stage(0, weights(0))
    good = snapshot.buffer[5].item()
    snapshot.buffer[5] ^= 1
    channel.publisher.publish(snapshot)
    time.sleep(0.5)
    assert not rollout.served
    snapshot.buffer[5] = good
    assert same(rollout.wait(0), 0)
    channel.close()


def test_segments_do_not_pile_up() -> None:
    channel = Channel("shm")
    rollout = channel.join()
    for version in range(3 * SEGMENTS):
        channel.publish(version)
    rollout.wait(3 * SEGMENTS - 1)
    mine = list(shm.directory().glob(f"{shm._prefix(channel.publisher._run_key)}*"))
    assert len(mine) <= SEGMENTS
    channel.close()
    assert not list(shm.directory().glob(f"{shm._prefix(channel.publisher._run_key)}*"))


@pytest.mark.parametrize("name", ["../etc/passwd", "other-thing", f"{shm.PREFIX}missing"])
def test_foreign_segments_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DigestError):
        shm.attach(name, 10)
