"""actors.jsonl of a run of months."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.services.broker import beats
from penstock.services.broker.beats import Beats
from penstock.services.runtime.lines import read_lines
from tests.weights.channel import until


def test_other_machines_see_that_a_broker_is_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of NFS keeps what is written for half a minute, unless it is told."""
    monkeypatch.setattr(beats, "SYNC_S", 0.0)
    synced: list[int] = []
    monkeypatch.setattr(beats.os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    written = Beats(tmp_path / "actors.jsonl")
    for count in range(1, 4):
        written.write({}, {}, {})
        until(lambda count=count: len(synced) == count and written._syncing.done(), 20, "the disk")
    written.close()
    assert len(synced) == 3 and synced[0] < synced[-1] == (tmp_path / "actors.jsonl").stat().st_size


def test_older_lines_are_thinned_and_the_last_ones_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "LIMIT", 20_000)
    monkeypatch.setattr(beats, "WHOLE", 50)
    path = tmp_path / "actors.jsonl"
    written = Beats(path)
    for second in range(5_000):
        written.write({}, {"leased": second}, {})
        assert path.stat().st_size <= 20_100
        if second == 2_500:  # a broker is started again
            written.close()
            written = Beats(path)
    written.close()
    seconds = [row["queues"]["leased"] for row in read_lines(path)]
    assert seconds[-50:] == list(range(4_950, 5_000)) and seconds[0] == 0
    assert seconds == sorted(set(seconds)) and len(seconds) > 100
    oldest, newest = (seconds[10] - seconds[0]), (seconds[-1] - seconds[-11])
    assert newest == 10 < oldest
