"""The store against a real Redis that dies, forgets, or belongs to another run."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from penstock.pipeline.run.redis_server import PrivateRedis
from penstock.services.broker.config import StoreConfig
from penstock.services.broker.store import Store, StoreError, is_loading
from tests.redis_log import append_only_file
from tests.weights.channel import until


class Server:
    """A Redis that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.redis = PrivateRedis(folder, "always")
        self.folder = folder
        self.start()

    @property
    def log(self) -> Path:
        return append_only_file(self.folder)

    def start(self, *options: str) -> None:
        self.process = subprocess.Popen([*self.redis.command, *options], stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.kill()
    made.redis.remove()


def open_store(server: Server, key: str = "k", retry_s: float = 10) -> Store:
    return Store(server.redis.url, "run", StoreConfig(retry_s=retry_s), key)


def write(store: Store, start: int, count: int) -> None:
    for number in range(start, start + count):
        store.put("t", number, {"value": number})
        store.put("t", "last", {"value": number})
        store.commit()


def test_commits_survive_a_kill(server: Server) -> None:
    store = open_store(server)
    write(store, 0, 20)
    server.kill()
    server.start()
    assert len(open_store(server).rows("t")) == 21


def test_a_commit_waits_for_a_store_that_is_away(server: Server) -> None:
    store = open_store(server)
    write(store, 0, 3)
    server.kill()
    threading.Timer(1.0, server.start).start()
    write(store, 3, 1)
    assert store.waited_s >= 0.5
    assert len(store.rows("t")) == 5


def test_what_a_torn_file_lost_is_written_again_in_order(server: Server) -> None:
    store = open_store(server)
    write(store, 0, 50)
    server.kill()
    os.truncate(server.log, server.log.stat().st_size // 2)
    server.start()
    write(store, 50, 1)
    rows = store.rows("t")
    assert rows["last"] == {"value": 50} and len(rows) == 52
    store.put_payload(7, "experience", b"a")
    write(store, 51, 1)
    server.kill()
    os.truncate(server.log, server.log.stat().st_size - 100)
    server.start()
    assert store.payloads([7]) == [{"experience": b"a"}], "reading sends again what is gone"
    assert store.rows("t")["last"] == {"value": 51}


def test_another_runs_store_is_refused(server: Server) -> None:
    open_store(server, "mine")
    with pytest.raises(StoreError, match="holds another run by the name 'run'"):
        open_store(server, "theirs")


def test_a_second_writer_is_noticed(server: Server) -> None:
    """Before it has written anything: the one that opened the store last goes on."""
    first, second = open_store(server), open_store(server)
    write(second, 0, 1)
    with pytest.raises(StoreError, match="another broker writes to this run"):
        write(first, 0, 5)
    write(second, 1, 1)
    assert set(second.rows("t")) == {"0", "1", "last"}


def test_a_store_that_reads_what_it_has_is_waited_for_and_others_hear_of_it(server: Server) -> None:
    heard: list[float] = []
    store = Store(server.redis.url, "test", StoreConfig(retry_s=1), idle=lambda: heard.append(time.monotonic()))
    for number in range(12_000):
        store.put("rows", number, {"n": number})
    store.commit()
    server.kill()
    said = subprocess.run([server.redis.command[0], "--version"], capture_output=True, text=True, check=True).stdout
    often = [] if "v=6." in said else ["--loading-process-events-interval-bytes", "1024"]
    server.start("--key-load-delay", "500", *often)  # for a command that it reads, in microseconds: 6 s
    until(lambda: is_loading(server.redis.url), 5, "it to read")
    store.put("rows", 12_000, {"n": 12_000})
    began = time.monotonic()
    store.commit()
    assert time.monotonic() - began > 1.5, "longer than store.retry_s"
    assert len(heard) > 2 and store.waited_s > 1.5
    assert len(store.rows("rows")) == 12_001 and not is_loading(server.redis.url)


def test_a_store_that_stays_away_is_an_error(server: Server) -> None:
    stores = [open_store(server, retry_s=0.5)]
    stores += [Store(server.redis.url, "run", StoreConfig(url=server.redis.url, retry_s=0.5), "k")]
    server.kill()
    started = time.monotonic()
    for store, why in zip(stores, ("the run's own Redis does not answer at unix://", "no Redis answers"), strict=True):
        with pytest.raises(StoreError, match=why):
            write(store, 0, 1)
    assert time.monotonic() - started < 5


def test_a_store_that_has_no_room_is_waited_for_and_told_what_would_give_it_some(server: Server) -> None:
    store, beside = open_store(server), redis.Redis.from_url(server.redis.url)
    beside.config_set("maxmemory", "1mb")
    store.put_payload(1, "experience", bytes(4 << 20))
    threading.Timer(1.0, beside.config_set, ("maxmemory", "0")).start()
    store.commit()
    assert store.waited_s > 0.5 and store.payloads([1])[0]["experience"] == bytes(4 << 20)
    beside.config_set("maxmemory", "1mb")
    store._retry_s = 0.3
    store.put_payload(2, "experience", bytes(4 << 20))
    with pytest.raises(StoreError, match=r"has no room .*\. Raise its maxmemory, or .* go on with --resume"):
        store.commit()


def test_a_store_that_gives_its_place_to_another_is_waited_for(server: Server) -> None:
    """As a managed one is maintained: for a while it takes no writes."""
    store = open_store(server)
    write(store, 0, 3)
    beside = redis.Redis.from_url(server.redis.url)
    beside.execute_command("REPLICAOF", "127.0.0.1", "1")
    threading.Timer(0.5, lambda: beside.execute_command("REPLICAOF", "NO", "ONE")).start()
    write(store, 3, 1)
    assert store.waited_s >= 0.3 and len(store.rows("t")) == 5
    beside.config_set("min-replicas-to-write", 1)
    threading.Timer(0.5, lambda: beside.config_set("min-replicas-to-write", 0)).start()
    write(store, 4, 1)
    assert len(store.rows("t")) == 6
    beside.execute_command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(StoreError, match="takes no writes at unix.*It is a replica"):
        open_store(server, retry_s=0.3)
