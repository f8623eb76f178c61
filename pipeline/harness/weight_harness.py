"""Publisher and receivers of `penstock bench weights`, the real ones, with nothing of a run around them."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from typing import Any

import torch

from penstock.pipeline.bench import plain_gloo
from penstock.pipeline.harness.fake_broker import FakeBroker
from penstock.protocols.digests import Gmac
from penstock.protocols.mailbox import Mailbox
from penstock.protocols.messages import Bye, Hello
from penstock.services.modeling.parallel.world import World
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.sender.publication import Publication
from penstock.services.weights.sender.publisher import Publisher
from penstock.services.weights.sender.shard_exporter import ShardExporter
from penstock.services.weights.transports.broadcast_group import serve_store

CPU = torch.device("cpu")
DEADLINE_S = 180.0
BARE_BYTES = 1 << 30
"""The plain broadcast needs a buffer in every process, beside the version's own two."""


class WeightHarness:
    """A publisher of ``named`` in this process, and receivers in processes of their own."""

    def __init__(
        self, named: dict[str, torch.Tensor], transport: str, verify: bool, threads: int, model: str = ""
    ) -> None:
        dtype = str(next(iter(named.values())).dtype).removeprefix("torch.")
        self.config = WeightsConfig.model_validate(
            {"transport": transport, "deadline_s": DEADLINE_S, "stall_s": 30.0, "sparse": "off"}
        )
        self.source = ShardExporter(named, dtype, self.config.bucket_bytes(), World(CPU), Gmac.of_run("bench"))
        self.fake_broker = FakeBroker()
        self._options = {
            "weights": self.config.model_dump(), "verify": verify, "threads": max(1, threads // 2), "model": model
        }  # fmt: skip
        self._mailbox = Mailbox(self.fake_broker.address, "trainer#1")
        self.publisher = Publisher(self.config, self.source, f"bench-{os.getpid()}", self._mailbox, verify=verify)
        self._mailbox.ask(Hello(kind="trainer", name="trainer", host="", pid=os.getpid()), 30)
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.rows: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.version = -1

    def join(self, wait: bool = True) -> str:
        """Starts a receiver; with ``wait``, until it can take part."""
        name = f"rollout-{len(self.processes)}#1"
        command = [sys.executable, "-m", "penstock.pipeline.harness.weight_receiver", self.fake_broker.address, name]
        process = subprocess.Popen(
            [*command, json.dumps(self._options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.processes[name] = process
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        deadline = time.monotonic() + DEADLINE_S
        while wait and not (name in self.publisher.peers and self.publisher.peers[name].transport):
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"{name} did not join within {DEADLINE_S:.0f} s")
            time.sleep(0.02)
        return name

    def publish(self) -> float:
        """A new version, handed to the publisher; returns when."""
        self.version += 1
        started = time.monotonic()
        self.publisher.publish(Publication(self.version))
        return started

    def loaded(self, count: int) -> list[dict[str, Any]]:
        """What ``count`` receivers say of the version published last."""
        rows: list[dict[str, Any]] = []
        while len(rows) < count:
            row = self.rows.get(timeout=DEADLINE_S)
            if row.get("version") == self.version:
                rows.append(row)
        deadline = time.monotonic() + DEADLINE_S
        while any(peer.loading for peer in self.publisher.peers.values()) and time.monotonic() < deadline:
            time.sleep(0.001)
        return rows

    def bare(self) -> tuple[float, float]:
        """GB/s of broadcasting as many bytes (at most `BARE_BYTES`) by plain gloo: in the same buckets, and as one
        tensor. A turn before makes connections and buffers warm."""
        store, address = serve_store("127.0.0.1")
        ranks = {name: rank for rank, name in enumerate(sorted(self.processes), 1)}
        nbytes, buckets = min(self.source.layout.nbytes, BARE_BYTES), self.source.layout.bucket_bytes
        turns = [buckets, buckets, nbytes]
        command = {"store": address, "name": str(self.version), "ranks": ranks, "nbytes": nbytes, "buckets": turns}
        for process in self.processes.values():
            assert process.stdin
            process.stdin.write(json.dumps({"bare": command}) + "\n")
            process.stdin.flush()
        group = plain_gloo.meet(store, str(self.version), 0, len(ranks) + 1)
        rates = []
        for bucket_bytes in turns:
            started = time.monotonic()
            plain_gloo.broadcast(group, plain_gloo.buffer(nbytes), bucket_bytes)
            ends: list[float] = []
            while len(ends) < len(self.processes):
                row = self.rows.get(timeout=DEADLINE_S)
                if "bare" in row:
                    ends.append(row["bare"])
            rates.append(nbytes / (max(ends) - started) / 1e9)
        return rates[1], rates[2]

    def close(self) -> None:
        """Ends all processes."""
        for process in self.processes.values():
            assert process.stdin
            process.stdin.close()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        self._mailbox.tell(Bye(reason="measured"))
        self.publisher.close()
        self._mailbox.close()
        self.fake_broker.close()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        for line in process.stdout:
            self.rows.put(json.loads(line))
