"""A Redis of the user's own is looked at before a run begins."""

from __future__ import annotations

import redis

from penstock.pipeline.config import load
from penstock.pipeline.preflight.machine import _look_at_store
from penstock.pipeline.preflight.report import Report
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
