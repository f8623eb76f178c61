"""Metrics to the trackers that people have: the real ones, offline, read back."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.services.broker import trackers
from penstock.services.broker.trackers import Trackers, run_id

CONFIG = {"gate": {"max_lag": 2}, "trainer": {"steps": 3}}
ROWS = [
    {"step": step, "reward": step / 4, "kind": "step", "ok": True, "sets/held out": 0.5, "aime/pass@4": 1.0}
    for step in range(3)
]


def logged(folder: Path, *names: Any) -> None:
    made = Trackers(names, folder, "sorting", CONFIG)
    for row in ROWS:
        made.log(row)
    made.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(trackers, "CLOSE_S", 120.0)  # a library's first import on a busy machine
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.key").write_text("secret")
    return tmp_path / "run"


def test_tensorboard_has_every_number(folder: Path) -> None:
    logged(folder, "tensorboard")
    (file,) = (folder / "tensorboard").iterdir()
    assert file.read_bytes().count(b"reward") == 3


def test_wandb_has_the_run_offline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged(folder, "wandb")
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 60  # a process of the library's own writes it
    while b"sets/held out" not in (data := file.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run_id(folder).encode() in data and b"max_lag" in data and b"sets/held out" in data


def test_trackio_has_the_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("trackio.utils", "trackio.sqlite_storage"):  # where it was imported before with another folder
        monkeypatch.setattr(f"{name}.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    logged(folder, "trackio")
    with sqlite3.connect(next((tmp_path / "trackio").glob("*.db"))) as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    assert [step for step, _ in rows] == [0, 1, 2] and '"reward"' in str(rows[2][1])


def test_mlflow_has_the_run_and_goes_on_with_it(folder: Path) -> None:
    pytest.importorskip("mlflow.store.tracking.sqlalchemy_store")
    from mlflow import MlflowClient

    logged(folder, "mlflow")
    logged(folder, "mlflow")  # the broker was started again
    uri = f"sqlite:///{folder}/mlflow.db"
    client = MlflowClient(uri, uri)
    experiment = client.get_experiment_by_name("sorting")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["gate.max_lag"] == "2" and run.info.status == "FINISHED"
    assert {each.step: each.value for each in client.get_metric_history(run.info.run_id, "reward")}[2] == 0.5
    assert len(client.get_metric_history(run.info.run_id, "aime/pass-4")) == 6, "it takes no @"


class Slow:
    """Takes its time, and breaks."""

    started = threading.Event()
    go_on = threading.Event()

    def __init__(self, _folder: Path, _project: str, _config: Mapping[str, Any]) -> None:
        pass

    def log(self, step: int, values: Mapping[str, float]) -> None:
        Slow.started.set()
        Slow.go_on.wait(60)
        raise SystemExit("no key")

    def close(self) -> None:
        raise AssertionError("it was given up")


def test_nobody_waits_for_a_tracker_that_is_slow_or_breaks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers.MAKERS, "wandb", Slow)
    made = Trackers(["wandb", "tensorboard"], folder, "sorting", CONFIG)
    made.log(ROWS[0])
    assert Slow.started.wait(60)
    for number in range(trackers.WAITING + 10):  # rows that have no room are left out: this ends before `go_on`
        made.log({"step": number, "reward": 1.0})
    Slow.go_on.set()
    monkeypatch.setattr(trackers, "CLOSE_S", 60.0)
    made.close()
    assert list((folder / "tensorboard").iterdir()), "the other one goes on"
