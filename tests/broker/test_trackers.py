"""Metrics to the trackers that people have: the real ones, offline, read back."""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import structlog

from penstock.services.broker import own_tracker, trackers
from penstock.services.broker.tracker_libraries import MAKERS, as_markdown, run_id
from penstock.services.broker.trackers import Table, Trackers

ROOT = Path(__file__).parents[2]
CONFIG = {"gate": {"max_lag": 2}, "trainer": {"steps": 3}}
ROWS = [
    {"step": step, "reward": step / 4, "kind": "step", "ok": True, "sets/held out": 0.5, "aime/pass@4": 1.0}
    for step in range(3)
]
COLUMNS = ("step", "group", "prompt", "response", "reward", "reward/exact", "finish", "tokens", "lag")


def table(step: int) -> Table:
    """Of two answers, one of which has no reward."""
    rows = [
        (step, 1, "sort <b>a=", "| ab |\n\nç", float("nan"), 1.0, "stop", 4, 0),
        (step, 2, "sort c=", f"answer of step {step}", 0.5, 1.0, "length", 8, 2),
    ]
    return Table("samples", COLUMNS, rows)


def logged(folder: Path, *names: Any, error: str | None = None) -> None:
    made = Trackers(names, folder, "sorting", CONFIG)
    for row in ROWS:
        made.log(row)
        made.table(row["step"], 1000, partial(table, row["step"]))  # type: ignore[call-overload]
    made.close(error)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(trackers, "CLOSE_S", 120.0)  # a library's first import on a busy machine
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.key").write_text("secret")
    return tmp_path / "run"


def test_tensorboard_has_every_number(folder: Path) -> None:
    logged(folder, "tensorboard")
    (file,) = (folder / "tensorboard").iterdir()
    data = file.read_bytes()
    assert data.count(b"aime") == 3 and b"    answer of step 2" in data


def test_wandb_has_the_run_offline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged(folder, "wandb")
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 60  # a process of the library's own writes it
    while b"sets/held out" not in (data := file.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run_id(folder).encode() in data and b"max_lag" in data and b"sets/held out" in data
    files = (folder / "wandb").glob("offline-run-*/files/media/table/samples/0-99_*.table.json")
    tables = sorted((json.loads(file.read_text()) for file in files), key=lambda table: table["data"][0][0])
    assert [row[3] for each in tables for row in each["data"] if row[1] == 2] == [table(s)[2][1][3] for s in range(3)]
    assert tables[0]["columns"] == [*COLUMNS] and tables[2]["data"][0][3:6] == ["| ab |\n\nç", None, 1.0]


def test_trackio_has_the_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("trackio.utils", "trackio.sqlite_storage"):  # where it was imported before with another folder
        monkeypatch.setattr(f"{name}.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    logged(folder, "trackio")
    with sqlite3.connect(next((tmp_path / "trackio").glob("*.db"))) as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    said = {step: [json.loads(metrics) for at, metrics in rows if at == step] for step, _ in rows}
    assert [*said] == [0, 1, 2] and any("reward" in each for each in said[2])
    (shown,) = (each["samples"]["_value"] for each in said[2] if "samples" in each)
    assert shown[1] == dict(zip(COLUMNS, table(2).rows[1], strict=True))


def test_mlflow_has_the_run_and_goes_on_with_it(folder: Path) -> None:
    pytest.importorskip("mlflow.store.tracking.sqlalchemy_store")
    from mlflow import MlflowClient

    uri = f"sqlite:///{folder}/mlflow.db"
    client = MlflowClient(uri, uri)

    def found_run() -> Any:
        (run,) = client.search_runs([client.get_experiment_by_name("sorting").experiment_id])
        return run

    logged(folder, "mlflow", error="the disk is full")
    assert found_run().info.status == "FAILED"
    tracker = MAKERS["mlflow"](folder, "sorting", CONFIG)
    assert found_run().info.status == "RUNNING"
    tracker.close(None)
    logged(folder, "mlflow")
    run = found_run()
    assert run.data.params["gate.max_lag"] == "2" and run.info.status == "FINISHED"
    assert {each.step: each.value for each in client.get_metric_history(run.info.run_id, "reward")}[2] == 0.5
    assert len(client.get_metric_history(run.info.run_id, "aime/pass-4")) == 6, "it takes no @"
    (file,) = folder.glob("mlflow/*/artifacts/samples/from-step-000000.json")
    found = json.loads(file.read_text())
    assert found["columns"] == [*COLUMNS] and [row[0] for row in found["data"]] == 2 * [0, 0, 1, 1, 2, 2]


def test_swanlab_is_told_numbers_and_tables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    class Grid:
        def add(self, headers: list[str], rows: list[list[Any]]) -> tuple[Any, ...]:
            return headers, rows

    def init(**given: Any) -> Any:
        said.append(given)
        return SimpleNamespace(
            log=lambda values, step: said.append((values, step)), finish=lambda **how: said.append(how)
        )

    fake: Any = ModuleType("swanlab")
    fake.init, fake.echarts, fake.Settings = init, SimpleNamespace(Table=Grid), lambda interactive: interactive
    monkeypatch.setitem(sys.modules, "swanlab", fake)
    logged(folder, "swanlab", error="the disk is full")
    begun, *rest, end = said
    assert begun["id"] == run_id(folder) and begun["resume"] == "allow" and begun["config"]["gate.max_lag"] == 2
    assert begun["settings"] is False, "nobody is there to be asked for a key"
    assert rest[0] == ({"reward": 0.0, "sets/held out": 0.5, "aime/pass@4": 1.0}, 0)
    assert end == {"state": "crashed", "error": "the disk is full"}
    assert rest[5] == ({"samples": ([*COLUMNS], [[*row] for row in rest[5][0]["samples"][1]])}, 2)
    assert rest[5][0]["samples"][1][1] == [*table(2).rows[1]]


def test_wandb_has_a_table_for_each_hundred_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an incremental one its page shows the last 100 additions."""
    said: list[dict[str, Any]] = []

    class Grid:
        def __init__(self, columns: list[str], dtype: list[type], log_mode: str) -> None:
            assert columns == [*COLUMNS] and log_mode == "INCREMENTAL"
            assert dtype == [int, int, str, str, float, float, str, int, int], "also where the first is NaN"
            self.steps: list[int] = []

        def add_data(self, *row: Any) -> None:
            self.steps.append(row[0])

    fake: Any = ModuleType("wandb")
    codes: list[int] = []
    run = SimpleNamespace(
        log=said.append, define_metric=lambda *_, **__: None, finish=lambda exit_code: codes.append(exit_code)
    )
    fake.init, fake.Table = lambda **_: run, Grid
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracker = MAKERS["wandb"](folder, "sorting", CONFIG)
    for step in (98, 99, 100, 250):
        tracker.table(*table(step))
    names = [name for row in said for name in row if name != "step"]
    assert names == ["samples/0-99", "samples/0-99", "samples/100-199", "samples/200-299"]
    tracker.close(None)
    tracker.close("the disk is full")
    assert codes == [0, 1], "a run that has failed is no finished one"
    assert said[1]["samples/0-99"].steps == [98, 98, 99, 99] and said[3]["samples/200-299"].steps == [250, 250]


def test_text_is_no_markdown() -> None:
    shown = as_markdown(("step", "response", "reward"), [(3, "# no title\n\n<b>", 0.25)])
    assert shown == "step **3**, reward **0.25**\n\nresponse:\n\n    # no title\n    \n    <b>"


BREAKS = """
class Breaks:
    def log(self, step, values):
        if step:
            raise KeyError(step)
"""


def test_a_class_of_the_users_own_is_a_tracker(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/extending.md has it, beside one that breaks and one that is not there."""
    page = (ROOT / "docs" / "extending.md").read_text().partition("## A tracker")[2]
    (tmp_path / "my_trackers.py").write_text(page.partition("```python\n")[2].partition("```")[0] + BREAKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    warned = structlog.testing.CapturingLogger()
    monkeypatch.setattr(trackers, "log", warned)
    logged(folder, "my_trackers:Breaks", "my_trackers:Board", "my_trackers:Absent")
    written = [json.loads(line) for line in (folder / "sorting.jsonl").read_text().splitlines()]
    assert [row.get("response", row["reward"]) for row in written if row.get("group") != 1] == [
        0.0, "answer of step 0", 0.25, "answer of step 1", 0.5, "answer of step 2",
    ]  # fmt: skip
    said = {call.kwargs["tracker"]: call.kwargs["error"] for call in warned.calls if "error" in call.kwargs}
    line = (tmp_path / "my_trackers.py").read_text().splitlines().index("            raise KeyError(step)") + 1
    assert "run.trackers: my_trackers:Breaks.log raised KeyError: 1" in said["my_trackers:Breaks"]
    assert f"my_trackers.py, line {line})" in said["my_trackers:Breaks"]
    assert "has no 'Absent'" in said["my_trackers:Absent"]
    lacks = {call.kwargs["tracker"]: call.kwargs["rows"] for call in warned.calls if "rows" in call.kwargs}
    assert lacks == {"my_trackers:Breaks": 2, "my_trackers:Absent": 3}
    assert len(warned.calls) == 4, "each is told of once, and alone"


class Static:
    @staticmethod
    def log(step: int, values: Mapping[str, float]) -> None: ...

    @classmethod
    def close(cls) -> None: ...


class Given:
    def __init__(self) -> None:
        self.log = lambda step, values: None


@pytest.mark.parametrize("kind", [Static, Given])
def test_a_class_may_have_its_methods_in_other_ways(kind: type, tmp_path: Path) -> None:
    made = own_tracker.OwnTracker(f"tests.broker.test_trackers:{kind.__name__}", tmp_path, "sorting", CONFIG)
    made.log(0, {})
    made.close(None)


class Slow:
    """Takes its time, and breaks."""

    started = threading.Event()
    go_on = threading.Event()

    def __init__(self, _folder: Path, _project: str, _config: Mapping[str, Any]) -> None:
        pass

    def table(self, name: str, columns: Any, rows: Any) -> None:
        raise AssertionError("it fails")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        Slow.started.set()
        Slow.go_on.wait(60)
        raise SystemExit("no key")

    def close(self, error: str | None) -> None: ...


class Outage:
    """Down for a while, and takes no row of step 3, that of step 4 only when it is told again, and no table."""

    down, unwell = True, True
    made, said = 0, list[int]()

    def __init__(self, _folder: Path, _project: str, _config: Mapping[str, Any]) -> None:
        Outage.made += 1

    def table(self, name: str, columns: Any, rows: Any) -> None:
        raise TypeError("no tables here")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if Outage.down or step == 3:
            raise ConnectionError("no network")
        if step == 4 and Outage.unwell:
            Outage.unwell = False
            raise TimeoutError("once")
        Outage.said.append(step)

    def close(self, error: str | None) -> None: ...


def test_a_tracker_that_was_down_has_what_it_missed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers.MAKERS, "wandb", Outage)
    for name in ("FIRST_PAUSE_S", "PAUSE_S", "POLL_S"):
        monkeypatch.setattr(trackers, name, 0.02)
    made = Trackers(["wandb"], folder, "sorting", CONFIG)
    for step in range(6):
        made.log({"step": step, "reward": 1.0})
    deadline = time.monotonic() + 30
    while Outage.made < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert made.failing == {"wandb": "ConnectionError: no network; 6 rows wait for it"}
    Outage.down = False
    while made.failing and time.monotonic() < deadline:
        time.sleep(0.01)
    made.table(6, 1000, partial(table, 6))
    made.log({"step": 7, "reward": 1.0})
    made.close()
    assert Outage.said == [0, 1, 2, 4, 5, 7] and not made.failing


def test_nobody_waits_for_a_tracker_that_is_slow_or_breaks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers.MAKERS, "wandb", Slow)
    monkeypatch.setattr(trackers, "WAITING", 200)
    made = Trackers(["wandb", "tensorboard"], folder, "sorting", CONFIG)
    made.log(ROWS[0])
    assert Slow.started.wait(60)
    made_by: list[str] = []

    def make(step: int) -> Table:
        made_by.append(threading.current_thread().name)
        return table(step)

    for step in range(14):  # likewise, sooner: they hold experience
        made.table(step, trackers.WAITING_BYTES // 4, partial(make, step))
        made.table(step, trackers.WAITING_BYTES // 4, partial(make, step))
    assert not made_by, "nobody has read them yet"
    for number in range(trackers.WAITING + 10):  # rows that have no room are left out: this ends before `go_on`
        made.log({"step": number, "reward": 1.0})
    Slow.go_on.set()
    monkeypatch.setattr(trackers, "CLOSE_S", 60.0)
    made.close()
    assert list((folder / "tensorboard").iterdir()), "the other one goes on"
    assert made_by == ["trackers"] * 4, "a step's once, and not by the broker"
