"""A trainer's publisher and rollouts' receivers over real sockets, shared memory and gloo. Only engine and broker are
small: one holds what it was given, the other passes messages on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from penstock.pipeline.harness.fake_broker import FakeBroker
from penstock.protocols import messages as m
from penstock.protocols.digests import Gmac
from penstock.protocols.mailbox import Mailbox
from penstock.services.modeling.parallel.world import World
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.receiver.loader import MappedVersion
from penstock.services.weights.receiver.receiver import Prepared, Receiver
from penstock.services.weights.sender.publication import Publication
from penstock.services.weights.sender.publisher import Publisher
from penstock.services.weights.sender.shard_exporter import ShardExporter

CPU = torch.device("cpu")
GMAC = Gmac.of_run("test")


Named = list[tuple[str, torch.Tensor]]


class Holder:
    """The part of an engine that a receiver uses. Its score depends on the weights, so a canary means something."""

    device = torch.device("cpu")
    remote = False

    def prepare(
        self, weights: Mapping[str, torch.Tensor], memory: MappedVersion | None = None
    ) -> dict[str, torch.Tensor]:
        return dict(weights)

    def score(self, prepared: Mapping[str, torch.Tensor], tokens: np.ndarray) -> np.ndarray:
        return score(prepared, tokens.tolist())


def score(weights: Mapping[str, torch.Tensor], tokens: list[int]) -> np.ndarray:
    total = float(sum(w.double().abs().mean() for w in weights.values()))
    return np.array([-total / (1 + token) for token in tokens[1:]], np.float32)


class Rollout:
    """A receiver with its mailbox; ``served`` are copies of what it swapped in, by version."""

    def __init__(self, address: str, name: str, config: WeightsConfig, engine: Any = None, verify: bool = True) -> None:
        self.name = name
        self.box = Mailbox(address, name)
        self.engine = engine or Holder()
        self.receiver = Receiver(self.engine, self.box, config, verify=verify)
        self.served: dict[int, dict[str, torch.Tensor]] = {}
        self.in_place: dict[str, torch.Tensor] = {}
        """What serves, as it lies."""
        self.loaded: dict[int, m.Loaded] = {}
        self.box.ask(m.Hello(kind="rollout", name=name, host="", pid=1), 5)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            event = self.box.inbox.get()
            if event is None:
                return
            if isinstance(event, m.Invite | m.Propose | m.CommitVersion):
                self.receiver.handle(event)
            elif isinstance(event, Prepared):
                version = event.loaded.version
                self.in_place = event.weights
                self.served[version] = {name: tensor.clone() for name, tensor in event.weights.items()}
                self.loaded[version] = event.loaded
                event.swapped.set()
                self.box.ask_later(event.loaded, 5)

    def wait(self, version: int, seconds: float = 20) -> dict[str, torch.Tensor]:
        until(lambda: version in self.served, seconds, f"{self.name} to serve version {version}; {sorted(self.served)}")
        return self.served[version]

    def close(self) -> None:
        self.box.tell(m.Bye(reason="over"))
        self.box.post(None)
        self.receiver.close()
        self.box.close()


class Channel:
    """A trainer whose model has ``named`` weights, and rollouts that join when asked to."""

    def __init__(self, named: Named, dtype: str = "float32", verify: bool = True, **config: Any) -> None:
        self.broker = FakeBroker()
        self.verify = verify
        self.box = Mailbox(self.broker.address, "trainer#1")
        config = {"deadline_s": 5, "stall_s": 3, "bucket_mb": 0.002, **config}
        self.config = WeightsConfig.model_validate(config)
        self.named = named
        self.source = ShardExporter(dict(named), dtype, self.config.bucket_bytes(), World(CPU), GMAC)
        self.run_key = f"test-{os.getpid()}-{id(self)}"
        self.publisher = Publisher(self.config, self.source, self.run_key, self.box, verify=verify)
        self.box.ask(m.Hello(kind="trainer", name="trainer", host="", pid=1), 5)
        self.rollouts: list[Rollout] = []

    def join(self, ready: bool = True, engine: Any = None, **config: Any) -> Rollout:
        """A rollout with ``config`` of its own; with ``ready``, one that takes part in the next epoch."""
        mine = WeightsConfig.model_validate({**self.config.model_dump(), **config})
        rollout = Rollout(self.broker.address, f"rollout-{len(self.rollouts)}#1", mine, engine, verify=self.verify)
        self.rollouts.append(rollout)
        if ready:
            until(
                lambda: self.peer(rollout) is not None and self.peer(rollout).transport, 5, "the rollout to be reached"
            )
        return rollout

    def peer(self, rollout: Rollout) -> Any:
        return self.publisher.peers.get(rollout.name)

    def publish(self, version: int, canary: m.Canary | None = None) -> Publication:
        """Publishes what the weights are now, and waits until they may change."""
        publication = self.publisher.publish(Publication(version, canary))
        publication.read.result(30)
        return publication

    def settled(self) -> None:
        """Waits until the trainer has everybody's answer."""
        until(lambda: all(p.loading is None for p in self.publisher.peers.values()), 10, "the answers")

    def close(self) -> None:
        for rollout in self.rollouts:
            rollout.close()
        self.publisher.close()
        self.box.close()
        self.broker.close()


def flip(monkeypatch: pytest.MonkeyPatch, receivers: list[Receiver], times: int) -> list[int]:
    """Flips a bit of what arrives at ``receivers``, ``times`` times; returns the list of buckets that were hit."""
    hit: list[int] = []
    original = Gmac.bucket

    def digest(gmac: Gmac, data: memoryview) -> str:
        if len(hit) < times and threading.current_thread() in {receiver._thread for receiver in receivers}:
            hit.append(len(data))
            damaged = bytearray(data)
            damaged[0] ^= 1
            return original(gmac, memoryview(damaged))
        return original(gmac, data)

    monkeypatch.setattr(Gmac, "bucket", digest)
    return hit


def until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    """Waits for ``condition``; fails by naming ``what`` was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.005)
