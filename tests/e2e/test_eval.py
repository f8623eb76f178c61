"""`penstock eval`: a checkpoint alone, over the whole pipeline."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from penstock.pipeline.config import Config, TinyModel, load
from penstock.pipeline.models.tiny import build
from penstock.pipeline.run import evaluate as evaluation
from penstock.services.data.config import SortData
from penstock.services.data.sort import SortSource
from tests.e2e.runs import ROOT

SETS = "prompts.eval={short: {type: sort, max_letters: 4}, long: {type: sort, min_letters: 8}}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows something, but not much."""
    folder = tmp_path_factory.mktemp("model")
    build(
        TinyModel(hidden_size=64, warm_start={"steps": 80, "corrupted": 0.3}), SortSource(SortData(), False), folder, 0
    )  # type: ignore[arg-type]
    return folder


def evaluate(checkpoint: Path, folder: Path, name: str, *overrides: str) -> tuple[str, dict[str, float]]:
    command = [sys.executable, "-m", "penstock.pipeline.cli", "eval", str(checkpoint)]
    command += [str(ROOT / "configs" / "quickstart.yaml"), f"run.folder={folder}", f"run.name={name}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["eval"] and not list((folder / name).glob("checkpoints/*/model*"))
    return done.stdout, rows[0]["sets"]


def test_sets_are_answered_as_they_ask_for_and_alike_each_time(checkpoint: Path, tmp_path: Path) -> None:
    asked = (SETS, "prompts.eval_size=24", "prompts.eval_sampling={short: {n: 4, temperature: 1.0}}")
    said, found = evaluate(checkpoint, tmp_path, "one", *asked)
    assert found.keys() == {"short", "long", "short/pass@1", "short/pass@2", "short/pass@4", "short/maj@4"}
    assert found["short/pass@1"] == pytest.approx(found["short"])
    assert 0 < found["short/pass@1"] < found["short/pass@4"] <= 1
    assert "pass@4" in said and "maj@4" in said and f"{found['short']:.4f}" in said
    assert evaluate(checkpoint, tmp_path, "two", *asked)[1] == pytest.approx(found)


def test_nothing_to_evaluate_on_is_told(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.pipeline.cli", "eval", str(checkpoint)]
    command += [str(ROOT / "configs" / "quickstart.yaml"), "prompts.eval=null", f"run.folder={tmp_path}"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert told.returncode == 2 and "prompts.eval: there is nothing to evaluate on" in told.stderr


def test_what_training_alone_needs_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Config] = []

    def begun(_console: Console, file: str, overrides: list[str], *_: object) -> int:
        read.append(load(Path(file), overrides))
        return 0

    monkeypatch.setattr(evaluation, "start", begun)
    model = tmp_path / "my best å"
    model.mkdir()
    given = ["trainer.algorithm.kl.coefficient=0.01", "reference.refresh_every=50"]
    assert evaluation.evaluate(Console(), str(model), ROOT / "configs" / "quickstart.yaml", given) == 0
    assert not read[0].with_reference and (read[0].run.name or "").startswith("eval-my-best-")
