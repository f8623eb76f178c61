"""A run's files as a trace: what stands where in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline.config import ConfigError
from penstock.pipeline.tools.trace import events, write_trace


def beat(time: float, trainer: int, rollout: int | None) -> dict[str, Any]:
    actors = {"trainer": {"kind": "trainer", "pid": trainer, "busy": 0.5}}
    if rollout:
        actors["rollout-0"] = {"kind": "rollout", "pid": rollout, "busy": 1.0, "tokens_per_s": 70.0}
    return {"time": time, "actors": actors, "queues": {"ready": 3, "note": None}}


def test_each_thing_is_where_it_was_and_as_long() -> None:
    steps = [{"step": 0, "time": 110.0, "train_step_s": 2.0, "wait_s": 1.0, "publish_wait_s": 0.5, "reward": 0.25}]
    load = {"receiver": "rollout-0", "version": 1, "time": 112.0, "receive_s": 0.5, "prepare_s": 0.25, "pause_s": 0.125}
    evaluation = {"label": "step 1", "time": 113.0, "reward": 0.5, "sets": {"held_out": 0.5}}
    beats = [beat(105.0, 1, 2), beat(106.0, 1, None), beat(107.0, 1, 3)]
    found = list(events(steps, [evaluation], beats, [load, {**load, "receiver": "somebody"}]))
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert sorted(names.values()) == ["rollout-0", "trainer"]
    spans = {e["name"]: (names[e["pid"]], e["ts"] / 1e6 + 105, e["dur"] / 1e6) for e in found if e["ph"] == "X"}
    assert spans == {
        "step 0": ("trainer", 108.0, 2.0),
        "waits for groups": ("trainer", 107.0, 1.0),
        "waits until the version before was read": ("trainer", 109.5, 0.5),
        "version 1: receive": ("rollout-0", 111.125, 0.5),
        "version 1: prepare": ("rollout-0", 111.625, 0.25),
        "version 1: swap: decoding stands still": ("rollout-0", 111.875, 0.125),
    }
    again = [event for event in found if event["name"] == "started again"]
    assert [(names[event["pid"]], event["ts"]) for event in again] == [("rollout-0", 2e6)]
    counters = [event for event in found if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"busy", "tokens_per_s", "groups in the queues"}
    assert all(value is not None for event in counters for value in event["args"].values())


def test_a_run_that_has_not_begun_is_an_empty_trace() -> None:
    assert list(events([], [], [], [])) == []


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(ConfigError, match=r"--out: .*trace\.json is no file, and would be replaced by one"):
        write_trace(tmp_path, tmp_path / "trace.json")


def test_where_a_run_goes_on_nobody_was_started_again() -> None:
    beats = [beat(100, 1, 2), beat(101, 1, 2), beat(130, 8, 9), beat(131, 8, 10)]
    again = [event["ts"] for event in events([], [], beats, []) if event["name"] == "started again"]
    assert again == [31e6]
