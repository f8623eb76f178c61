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

import redis
import structlog
from rich.console import Console
from rich.table import Table

from penstock.pipeline.bench.machine import describe
from penstock.pipeline.harness.ack_server import ack_server
from penstock.pipeline.harness.simulated_rollouts import IN_FLIGHT, N, make_payload
from penstock.pipeline.run.redis_server import PrivateRedis
from penstock.protocols import messages as m
from penstock.protocols.columns import Column, ColumnTable
from penstock.protocols.experience import GroupSummary, as_bytes
from penstock.protocols.mailbox import Mailbox
from penstock.protocols.router_server import RouterServer
from penstock.services.broker.config import BrokerConfig, GateConfig, PromptsConfig, ReplayConfig, StoreConfig
from penstock.services.broker.service import Broker
from penstock.services.broker.state import BrokerSettings
from penstock.services.rollout.config import SamplingConfig
from penstock.services.runtime.processes import raise_file_limit


def bench(console: Console, rollouts: list[int], groups: int, tokens: int) -> None:
    """Simulated rollouts answer leases at once with groups of ``N`` trajectories of ``tokens`` tokens; the gate is wide
    open and nothing is scored, so that what is measured is the way from lease to durable."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    payload, summary = make_payload(tokens)
    raise_file_limit()
    table = Table(title=f"{groups} groups of {len(payload) / 1024:.1f} KiB, each durable before it is acknowledged")
    for column in ("rollouts", "way", "groups/s", "MB/s", "share of raw Redis", "lost"):
        table.add_column(column)
    for count in rollouts:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            server = PrivateRedis(Path(folder), "always")
            process = subprocess.Popen(server.command, stdout=subprocess.DEVNULL)
            try:
                _wait_for(server.url)
                raw_redis = _raw_redis(server.url, payload, groups, min(256, count * IN_FLIGHT))
                raw_zmq = _raw_zmq(payload, summary, groups, count)
                through, lost = _through_broker(Path(folder), server.url, tokens, groups, count)
            finally:
                process.kill()
                process.wait()
                server.remove()
        for way, rate in (("broker and Redis", through), ("raw Redis, pipelined", raw_redis), ("raw ZeroMQ", raw_zmq)):
            share = f"{rate / raw_redis:.2f}"
            dead = str(lost) if way == "broker and Redis" else ""
            table.add_row(str(count), way, f"{rate:,.0f}", f"{rate * len(payload) / 1e6:,.1f}", share, dead)
    console.print(table)
    console.print(f"fsync always; {describe()}", highlight=False)


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


def _raw_zmq(payload: bytes, summary: GroupSummary, groups: int, clients: int) -> float:
    """The same messages, acknowledged without being looked at: one client with as many in flight as all have."""
    message = m.Finished(purpose="train", number=0, attempt=1, summary=summary, experience=as_bytes(payload))
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


def _through_broker(folder: Path, url: str, tokens: int, groups: int, rollouts: int) -> tuple[float, int]:
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
    )
    broker = Broker(settings, url)
    thread = threading.Thread(target=broker.serve, daemon=True)
    thread.start()
    command = [sys.executable, "-P", "-m", "penstock.pipeline.harness.simulated_rollouts", broker.address]
    arguments = (str(rollouts), str(groups), str(tokens))
    done = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    lost = len(broker.state["lost"])
    broker.stop("measured")
    thread.join(30)
    rate, expelled = done.stdout.split()
    return float(rate), max(lost, int(expelled))
