"""actors.jsonl of a run of months."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

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


def test_a_run_of_weeks_is_seen_from_end_to_end_however_often_it_was_thinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not its last hours alone: what is thinned each time is spread over the whole of its time."""
    monkeypatch.setattr(beats, "LIMIT", 20_000)
    monkeypatch.setattr(beats, "WHOLE", 50)
    now = [0.0]
    monkeypatch.setattr(beats.time, "time", lambda: now[0])
    path, thinned = tmp_path / "actors.jsonl", []
    written = Beats(path)
    thin = written._thin
    monkeypatch.setattr(written, "_thin", lambda: thinned.append(1) or thin())
    for second in range(20_000):
        now[0] = float(second)
        written.write({}, {}, {})
    written.close()
    assert len(thinned) > 20
    times = [row["time"] for row in read_lines(path)]
    assert times[0] == 0.0 and times == sorted(times)
    assert max(later - earlier for earlier, later in pairwise(times)) < 20_000 / 40


def test_a_file_that_takes_nothing_costs_its_lines_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(beats, "log", SimpleNamespace(warning=lambda told, **about: said.append(told)))
    path = tmp_path / "actors.jsonl"
    path.symlink_to("/dev/full")
    written = Beats(path)
    for _ in range(3):
        written.write({}, {}, {})
    assert said == ["what actors do cannot be written down"]
    with suppress(OSError):
        written.close()
