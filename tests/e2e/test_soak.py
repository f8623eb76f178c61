"""A short soak: what a run keeps does not grow with its steps. The long one is `penstock bench soak`."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import redis

from penstock.pipeline.bench.soak import TINY
from tests.e2e.runs import Run, check_promises


def look(run: Run) -> tuple[dict[str, int], float]:
    """Rows of each table, number of payloads, and the broker's MiB."""
    client = redis.Redis.from_url(f"unix://{run.folder / 'redis' / 'redis.sock'}")
    prefix = f"penstock:{run.folder.name}:"
    tables = ("ledger", "versions", "leases", "replay", "dropped")
    rows = {table: client.hlen(prefix + table) for table in tables}
    rows["payloads"] = len(client.keys(prefix + "payload:*"))
    client.close()
    broker: psutil.Process = run.actors()["broker"]
    return rows, broker.memory_info().rss / 2**20


@pytest.mark.chaos
def test_redis_and_broker_stay_flat(tmp_path: Path) -> None:
    run = Run(tmp_path, [*TINY, "trainer.steps=400", "trainer.checkpoint.every=20"])
    run.wait_for_step(150)
    _, before = look(run)
    run.wait_for_step(330)
    rows, after = look(run)
    assert rows["ledger"] <= 45 and rows["payloads"] <= 45 * 4 + 30 and rows["versions"] <= 101
    assert rows["leases"] <= 12 and rows["replay"] <= 12
    assert after - before < 8
    check_promises(run.wait())
