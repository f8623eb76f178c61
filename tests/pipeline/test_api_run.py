"""`penstock.Run`, and what `Trainer.train` says while it waits for one."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from penstock.pipeline.api.run import launched
from penstock.pipeline.config import ConfigError

STEP = """open("metrics.jsonl", "a").write('{"kind": "step", "step": 4, "reward": 2.0}\\n')"""


def test_each_step_is_told_once(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "config.yaml").touch()
    file, told = tmp_path / "metrics.jsonl", []

    def on_step(row: dict[str, Any]) -> None:
        told.append((row["step"], row["reward"]))
        if len(told) == 2:  # while it is waited for, one step is done again and one is new
            with file.open("a") as more:
                more.write("".join(f'{{"kind": "step", "step": {step}, "reward": 0.5}}\n' for step in (1, 2)))

    file.write_text("".join(f'{{"kind": "step", "step": {step}, "reward": 0.0}}\n' for step in (0, 1)))
    held = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3)"])
    run = penstock.pipeline.api.run.Run(tmp_path, held)
    with pytest.raises(TimeoutError, match="at step 3; it goes on"):
        run.wait(1, on_step)
    assert told == [(0, 0.0), (1, 0.0), (2, 0.5)]
    with file.open("a") as more:
        more.write('{"kind": "step", "step": 3, "reward": 1.0}\n')
    with pytest.raises(penstock.RunFailed):
        run.wait(60, on_step)
    assert told[3:] == [(3, 1.0)], "by another wait what is new"
    monkeypatch.setattr("penstock.pipeline.api.run.penstock", lambda *_: [sys.executable, "-c", STEP])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(penstock.RunFailed):
        run.resume().wait(60, on_step)
    assert told[4:] == [(4, 2.0)], "of one that goes on its own"


def of_a_run(tmp_path: Path, monkeypatch: Any, code: str = "pass", **metrics: float) -> penstock.Trainer:
    """A trainer whose run in ``tmp_path / "run"`` has done a step, from which nothing was learned, and is over once
    ``code`` is."""
    folder = tmp_path / "run"

    def launched(*_: Any) -> penstock.Run:
        folder.mkdir()
        (folder / "config.yaml").write_text("trainer: {steps: 3}\n")
        row = {"kind": "step", "step": 0, "train_s": 100.0, "reward": 0.5, "lag_mean": 0.0} | metrics
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        summary = {"outcome": "complete", "look_at_this": ["nothing was learned: the gradient was 0 in every step"]}
        (folder / "summary.json").write_text(json.dumps(summary))
        return penstock.Run(folder, subprocess.Popen([sys.executable, "-c", code]))

    monkeypatch.setattr("penstock.pipeline.api.trainer.launched", launched)
    start = {"model": {"type": "tiny"}, "prompts": {"train": {"type": "sort"}}}
    return penstock.Trainer(start, name="run", folder=tmp_path)


def test_what_one_should_look_at_is_said_at_the_end(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    of_a_run(tmp_path, monkeypatch).train()
    said = capsys.readouterr().out
    assert "eta 0:03:20" in said, "of the last step seen, when two were to come"
    assert "look at this:" in said and "nothing was learned: the gradient was 0 in every step" in said


@pytest.mark.parametrize(
    ("metrics", "said"),
    [({}, "reward 0.500  lag 0.00"), ({"reward": math.nan, "given_nll": 1.25}, "given_nll 1.250"),
     ({"given_nll": 1.25}, "reward 0.500  lag 0.00")],
)  # fmt: skip
def test_a_notebook_without_widgets_is_told_each_step(
    tmp_path: Path, monkeypatch: Any, capsys: Any, metrics: dict[str, float], said: str
) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("penstock.pipeline.api.trainer.find_spec", lambda _: None)
    monkeypatch.setattr("penstock.pipeline.api.trainer.print_findings", lambda *_: None)
    of_a_run(tmp_path, monkeypatch, **metrics).train()
    assert capsys.readouterr().out == f"\r1 steps  {said}"


SAVES = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: (time.sleep(1.8), sys.exit(130)))
pathlib.Path("ready").touch()
time.sleep(60)
"""


def test_whoever_interrupts_waits_for_the_checkpoint_and_is_told_how_to_go_on(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Which may take an hour: here time flies."""

    def interrupt(_: dict[str, Any]) -> None:
        while not Path("ready").exists():
            time.sleep(0.02)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    minutes = SimpleNamespace(monotonic=lambda: 100 * time.monotonic(), sleep=time.sleep)
    monkeypatch.setattr("penstock.pipeline.api.run.time", minutes)
    trainer = of_a_run(tmp_path, monkeypatch, SAVES)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(on_step=interrupt)
    folder, said = tmp_path / "run", capsys.readouterr().err
    assert "interrupted: the run drains and saves a checkpoint" in said
    assert f"the run is in {folder}; go on with penstock.Run('{folder}').resume()" in said


def test_a_run_that_has_just_been_started_is_being_prepared(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert penstock.Run(tmp_path / "run", process).status()["phase"] == "preparing"
    process.kill()
    process.wait()
    with pytest.raises(ConfigError, match="no such folder"):
        penstock.Run(tmp_path / "run", process).status()


STOPS = "import signal, sys, time; signal.signal(signal.SIGINT, lambda *_: sys.exit(130)); print(flush=True); {}"


def test_a_run_that_goes_on_is_not_what_it_was_before(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").touch()
    (folder / "summary.json").write_text('{"outcome": "complete", "steps": 3}')
    (folder / "broker.address").write_text("tcp://127.0.0.1:9\n")
    run = launched([sys.executable, "-c", STOPS.format("time.sleep(60)")], folder)
    assert run.summary is None and run.status()["phase"] == "preparing"
    output = tmp_path / "run.script" / "output.log"
    while not output.read_text():
        time.sleep(0.05)
    assert run.stop() is None
    with pytest.raises(penstock.RunFailed):
        run.wait(0)
    assert penstock.Run(folder).wait(0)["steps"] == 3, "the folder is as it was"

    says = """open("run/summary.json", "w").write('{"outcome": "interrupted"}'); sys.exit(130)"""
    monkeypatch.chdir(tmp_path)
    assert launched([sys.executable, "-c", STOPS.format(says)], folder).wait(60) == {"outcome": "interrupted"}
    complete = launched([sys.executable, "-c", "pass"], folder)  # which had nothing to do
    assert complete.wait(60) == {"outcome": "interrupted"}


def test_a_folder_of_the_users_among_the_checkpoints_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    assert penstock.Run(tmp_path).checkpoint is None
    for name in ("step-000009", "step-000010", "step-best", "step-12"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert penstock.Run(tmp_path).checkpoint == tmp_path / "checkpoints" / "step-000010"


def test_a_folder_that_is_no_runs_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run's folder: it has no config.yaml"):
        penstock.Run(tmp_path)


def test_a_run_of_another_machine_is_under_way(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "run.lock").write_text("4242 1790000000.25")
    (tmp_path / "broker.address").write_text("tcp://10.1.0.7:5555\n")
    (tmp_path / "actors.jsonl").touch()
    run = penstock.Run(tmp_path)
    assert run.running
    with pytest.raises(TimeoutError, match="it goes on"):
        run.wait(0)
    with pytest.raises(
        ConfigError, match="stop: .* not by a penstock run of this machine .its broker is at tcp://10.1"
    ):
        run.stop()
    with pytest.raises(ConfigError, match="resume: .* is under way"):
        run.resume()
    (tmp_path / "summary.json").write_text('{"outcome": "interrupted", "steps": 3}')
    assert not run.running and run.wait(0)["steps"] == 3 and run.stop() is not None
