"""A Redis of the user's own is looked at before a run begins."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import redis

from penstock.pipeline.config import load
from penstock.pipeline.preflight.machine import _look_at_store
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.run.redis_server import find_server
from tests.e2e.runs import ROOT


def looked_at(url: str) -> Report:
    report = Report()
    _look_at_store(load(ROOT / "configs" / "quickstart.yaml", [f"store.url={url}"]), report)
    return report


def test_one_that_throws_away_is_refused_and_one_that_does_not_save_is_noted(redis_url: str) -> None:
    server = redis.Redis.from_url(redis_url)
    assert not looked_at(redis_url).here and not looked_at(redis_url).notes
    server.config_set("maxmemory-policy", "allkeys-lru")
    server.config_set("appendonly", "no")
    found = looked_at(redis_url)
    assert len(found.here) == 1 and "maxmemory-policy allkeys-lru" in found.here[0] and "noeviction" in found.here[0]
    assert len(found.notes) == 1 and "appendonly yes" in found.notes[0]
    server.config_set("maxmemory-policy", "volatile-lru")
    assert not looked_at(redis_url).here, "nothing of ours expires"


def test_one_in_cluster_mode_is_refused(tmp_path: Path) -> None:
    socket = tmp_path / "redis.sock"
    command = [
        find_server(),
        "--port",
        "0",
        "--unixsocket",
        str(socket),
        "--cluster-enabled",
        "yes",
        "--dir",
        str(tmp_path),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 30
            while not socket.exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            (problem,) = looked_at(f"unix://{socket}").problems
        finally:
            server.kill()
    assert "is in cluster mode" in problem
