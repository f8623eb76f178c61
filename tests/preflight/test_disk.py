"""Room and leave to write are looked for where the run will lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipeline.config import load
from penstock.pipeline.preflight.machine import _look_at_disk
from penstock.pipeline.preflight.report import Report
from tests.e2e.runs import QUICKSTART


def looked_at(folder: Path, run_folder: str) -> list[str]:
    report = Report()
    _look_at_disk(load(QUICKSTART, [f"run.folder={run_folder}"]), folder, report)
    return report.here


def test_a_run_that_goes_on_is_looked_for_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_at(Path("/proc/runs/first"), "/proc/runs") == [
        "run.folder: cannot write to /proc; choose another folder"
    ]
    (tmp_path / "config.yaml").touch()
    monkeypatch.chdir("/proc")
    assert not looked_at(tmp_path, "runs")
    monkeypatch.setattr("penstock.pipeline.preflight.machine._writable", lambda folder: folder != tmp_path)
    assert looked_at(tmp_path, str(tmp_path.parent)) == [f"the run's folder: cannot write to {tmp_path}; move it"]
