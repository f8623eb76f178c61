"""`penstock bench broker`: groups through broker and Redis, beside raw ZeroMQ and raw Redis in the same run."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import redis
import structlog
from rich.console import Console
from rich.table import Table

from penstock.pipeline.bench.machine import describe
from penstock.pipeline.harness.ack_server import ack_server
from penstock.pipeline.run.redis_server import PrivateRedis
from penstock.protocols import messages as m
from penstock.protocols.columns import Column, ColumnTable
from penstock.protocols.experience import Group, GroupSummary, Prompt, Trajectory, as_bytes, pack_group
from penstock.protocols.mailbox import Mailbox, RouterServer
from penstock.protocols.versions import Digests
from penstock.services.broker.config import BrokerConfig, GateConfig, PromptsConfig, ReplayConfig, StoreConfig
from penstock.services.broker.service import Broker
from penstock.services.broker.state import BrokerSettings
from penstock.services.rollout.config import SamplingConfig

N = 8
IN_FLIGHT = 8
"""Groups that each simulated rollout holds."""


def bench(console: Console, rollouts: list[int], groups: int, tokens: int) -> None:
    """Simulated rollouts answer leases at once with groups of ``N`` trajectories of ``tokens`` tokens; the gate is wide
    open and nothing is scored, so that what is measured is the way from lease to durable."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    payload = _payload(tokens)
    table = Table(title=f"{groups} groups of {len(payload) / 1024:.1f} KiB, each durable before it is acknowledged")
    for column in ("rollouts", "way", "groups/s", "MB/s", "share of raw Redis"):
        table.add_column(column)
    for count in rollouts:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            server = PrivateRedis(Path(folder), "always")
            process = subprocess.Popen(server.command, stdout=subprocess.DEVNULL)
            try:
                _wait_for(server.url)
                raw_redis = _raw_redis(server.url, payload, groups, min(256, count * IN_FLIGHT))
                raw_zmq = _raw_zmq(payload, groups, count)
                through = _through_broker(Path(folder), server.url, payload, groups, count)
            finally:
                process.kill()
                process.wait()
                server.remove()
        for way, rate in (("broker and Redis", through), ("raw Redis, pipelined", raw_redis), ("raw ZeroMQ", raw_zmq)):
            share = f"{rate / raw_redis:.2f}"
            table.add_row(str(count), way, f"{rate:,.0f}", f"{rate * len(payload) / 1e6:,.1f}", share)
    console.print(table)
    console.print(f"fsync always; {describe()}", highlight=False)


def _payload(tokens: int, number: int = 0) -> bytes:
    random = np.random.default_rng(0)
    prompt = tokens // 4
    rows = [
        Trajectory(
            random.integers(0, 50_000, tokens).astype(np.int32),
            np.r_[np.zeros(prompt), np.ones(tokens - prompt)].astype(np.uint8),
            np.r_[np.zeros(prompt), -random.random(tokens - prompt)].astype(np.float32),
            np.r_[np.full(prompt, -1), np.zeros(tokens - prompt)].astype(np.int32),
            "x" * (tokens - prompt),
        )
        for _ in range(N)
    ]
    return pack_group(Group(number, Prompt(index=0, text="p"), rows))


def _wait_for(url: str) -> None:
    client = redis.Redis.from_url(url)
    deadline = time.monotonic() + 10
    while True:
        try:
            client.ping()
            return
        except redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _raw_redis(url: str, payload: bytes, groups: int, batch: int) -> float:
    """Writes as many groups as may be under way in one MULTI/EXEC, as the broker's turns do."""
    client = redis.Redis.from_url(url)
    started = time.perf_counter()
    for start in range(0, groups, batch):
        pipeline = client.pipeline(transaction=True)
        for number in range(start, min(start + batch, groups)):
            pipeline.hset(f"raw:{number}", "experience", payload)
        pipeline.execute()
    rate = groups / (time.perf_counter() - started)
    client.flushall()
    return rate


def _finished(number: int, attempt: int, payload: bytes) -> m.Finished:
    """What a rollout says; the broker believes the summary."""
    summary = GroupSummary(trajectories=N, tokens=len(payload) // 14, sampled=len(payload) // 14, oldest=0, newest=0)
    return m.Finished(purpose="train", number=number, attempt=attempt, summary=summary, experience=as_bytes(payload))


def _raw_zmq(payload: bytes, groups: int, clients: int) -> float:
    """The same messages, acknowledged without being looked at: one client with as many in flight as all have."""
    message = _finished(0, 1, payload)
    waiting: deque[Future[m.Message]] = deque()
    with ack_server(RouterServer("tcp://127.0.0.1:0")) as router:
        box = Mailbox(router.address, "raw#1")
        started = time.perf_counter()
        for _ in range(groups):
            waiting.append(box.ask_later(message, 60))
            if len(waiting) >= min(256, clients * IN_FLIGHT):
                waiting.popleft().result()
        for future in waiting:
            future.result()
        rate = groups / (time.perf_counter() - started)
        box.close()
    return rate


def _through_broker(folder: Path, url: str, payload: bytes, groups: int, rollouts: int) -> float:
    """A real broker in this process, the simulated rollouts in another."""
    sampling = SamplingConfig(n=N, max_new_tokens=8)
    settings = BrokerSettings(
        run="bench",
        folder=folder,
        seed=0,
        steps=1 << 40,
        broker=BrokerConfig(dead_after_s=60),
        gate=GateConfig(max_lag=1 << 30, groups_per_step=1 << 20),
        store=StoreConfig(),
        replay=ReplayConfig(),
        prompts=PromptsConfig.model_validate({"train": {"type": "sort"}}),
        sampling=sampling.training(),
        eval_sampling=sampling.greedy(),
        columns=ColumnTable(columns=(Column(name="reward/none", scorer="reward", nullable=True),)),
        tensorboard=False,
    )
    broker = Broker(settings, url)
    thread = threading.Thread(target=broker.serve, daemon=True)
    thread.start()
    command = [sys.executable, "-P", "-m", "penstock.pipeline.bench.broker", broker.address, str(rollouts), str(groups)]
    tokens = len(payload) // (N * 14)
    done = subprocess.run([*command, str(tokens)], capture_output=True, text=True, check=True)
    broker.stop("measured")
    thread.join(30)
    return float(done.stdout)


class _Simulated:
    """A rollout that answers every lease at once."""

    def __init__(self, address: str, name: str, publish: bool) -> None:
        digests = Digests(buckets=(), whole="none")
        if publish:
            trainer = Mailbox(address, "trainer#1")
            trainer.ask(m.Hello(kind="trainer", name="trainer", host="", pid=0), 30)
            trainer.ask(m.CommitVersion(targets=[], epoch=0, version=0, digests=digests), 30)
            trainer.tell(m.Bye(reason="published"))
            trainer.close()
        self.box = Mailbox(address, f"{name}#1")
        self.box.ask(m.Hello(kind="rollout", name=name, host="", pid=0), 30)
        self.box.beat_s, self.box.beat = 2.0, m.Heartbeat
        loaded = m.Loaded(epoch=0, version=0, digest=digests.whole, transport="shm")
        self.box.ask(loaded, 30)


def simulate(address: str, rollouts: int, groups: int, tokens: int) -> float:
    """Groups a second from the first lease to the last acknowledgement, over all simulated rollouts."""
    import queue

    everybody = [_Simulated(address, f"rollout-{i}", publish=i == 0) for i in range(rollouts)]
    inbox: queue.SimpleQueue[tuple[_Simulated, m.Lease]] = queue.SimpleQueue()
    template = _payload(tokens)
    marker = template.index(b"\xa6number") + 7
    for one in everybody:
        one.box.arrived = lambda message, one=one: inbox.put((one, message)) if isinstance(message, m.Lease) else None
    given = dict.fromkeys(everybody, IN_FLIGHT)
    started = time.perf_counter()
    for one in everybody:
        one.box.tell(m.Credit(total=IN_FLIGHT))
    done = threading.Semaphore(0)
    for _ in range(groups):
        one, lease = inbox.get(timeout=60)
        number = lease.number
        packed = bytes([0xCE]) + number.to_bytes(4, "big")
        data = template[:marker] + packed + template[marker + 1 :]
        message = _finished(number, lease.attempt, data)

        def answered(_: Future[m.Message], one: _Simulated = one) -> None:
            given[one] += 1
            one.box.tell(m.Credit(total=given[one]))
            done.release()

        one.box.ask_later(message, 60).add_done_callback(answered)
    for _ in range(groups):
        done.acquire(timeout=60)
    rate = groups / (time.perf_counter() - started)
    for one in everybody:
        one.box.tell(m.Bye(reason="measured"))
        one.box.close()
    return rate


if __name__ == "__main__":
    sys.stdout.write(str(simulate(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
