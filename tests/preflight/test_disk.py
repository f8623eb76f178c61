"""Room and leave to write are looked for where the run will lie."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.pipeline.config import load
from penstock.pipeline.preflight.machine import _look_at_disk
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.resources.host import host_needs
from penstock.services.runtime.gpus import GIB
from tests.e2e.runs import QUICKSTART, ROOT

PRETRAINED = ROOT / "configs" / "grpo-0.5b.yaml"


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


def test_checkpoints_that_are_there_are_among_those_that_room_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, usage = load(PRETRAINED), shutil.disk_usage(tmp_path)
    needs = host_needs(config)
    assert needs
    wanted = int(needs.checkpoints * GIB)
    (tmp_path / "config.yaml").touch()
    monkeypatch.setattr("penstock.pipeline.preflight.machine.LEAST_MIB", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=wanted - 1000))
    report = Report()
    _look_at_disk(config, tmp_path, report)
    assert "checkpoints take" in report.here[0]
    (folder := tmp_path / "checkpoints" / "step-000050").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(2000))
    report = Report()
    _look_at_disk(config, tmp_path, report)
    assert not report.here
