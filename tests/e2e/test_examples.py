"""The examples, as somebody copies them into a folder of their own: shorter, but all their code runs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
from typer.testing import CliRunner

import penstock
from penstock.pipeline import cli
from penstock.pipeline.run.summary import steps_of
from penstock.pipeline.tools.export import FIXED
from penstock.services.broker import archive
from penstock.services.runtime.lines import read_lines
from tests.e2e.runs import ROOT, SHORT, Run, check_promises, free_port

EXAMPLES = ROOT / "examples"


def run_copy(name: str, tmp_path: Path, *overrides: str) -> tuple[Run, dict[str, object]]:
    """A copy of the example, away from the repository, for a few steps."""
    folder = shutil.copytree(EXAMPLES / name, tmp_path / name)
    run = Run(tmp_path, [*SHORT, *overrides], folder / "config.yaml")
    summary = run.wait()
    check_promises(summary)
    assert summary["steps"] == 6 and summary["rewards_failed"] == 0 and summary["eval_after"] is not None
    return run, summary


def test_own_data_and_own_reward(tmp_path: Path) -> None:
    run, summary = run_copy("own-data", tmp_path)
    rows = steps_of(run.folder)
    assert all(row["reward"] == pytest.approx(row["reward/letters_in_place"]) for row in rows)
    assert any(row["reward/exact_match"] != row["reward"] for row in rows)
    archived = list(penstock.rollouts(run.folder))
    assert len(archived) == summary["groups_trained"] * 4  # type: ignore[operator]
    assert {row["prompt"].partition(" ")[0] for row in archived} == {"next"}
    kept = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    assert len(kept) == 6 * 4 and all(row in archived for row in kept)
    exported(run, archived, tmp_path / "rollouts.parquet")


def test_preferences(tmp_path: Path) -> None:
    """Pairs of given answers: no reward is asked in training, and the reference is there."""
    run, summary = run_copy("preferences", tmp_path, "rollout.sampling.n=2")
    rows = steps_of(run.folder)
    assert rows[0]["preferred_margin"] == pytest.approx(0.0, abs=1e-3) and rows[-1]["preferred_margin"] > 0.2
    assert rows[-1]["preferred_likelier"] > 0.8 and summary["reward_last"] is None
    assert all(row["given_tokens"] == row["tokens"] > 0 and row["reward_given"] == 0.5 for row in rows)
    assert summary["generated_tokens"] == 0
    held_out = summary["eval_pairs_after"]["given"]
    assert held_out["preferred_likelier"] > 0.8 and held_out["preferred_margin"] > 0.2
    began, ended = (summary[f"eval_loss_{when}"]["given"] for when in ("before", "after"))
    assert began == pytest.approx(np.log(2)) and ended < began - 0.01
    samples = read_lines(run.folder / "samples.jsonl")
    assert {row["finish"] for row in samples} == {"given"} and {row["reward"] for row in samples} == {0.0, 1.0}


def exported(run: Run, archived: list[dict[str, Any]], file: Path) -> None:
    """What `penstock rollouts --export` has written is what was trained on, as pandas and datasets read it."""
    told = CliRunner().invoke(cli.app, ["rollouts", str(run.folder), "--export", str(file)])
    assert f"{len(archived)} trajectories in" in told.output, told.output
    frame = pandas.read_parquet(file)
    for name in ("step", "group", "sample", "prompt", "response", "truth", "tokens", "finish", "reward"):
        assert frame[name].tolist() == pytest.approx([row[name] for row in archived]), name
    trained = [
        (int(t.sampled), t.tokens.tolist(), t.logprobs.tolist(), t.versions.tolist())
        for batch, _ in archive.read(run.folder)
        for taken in batch.groups
        for t in archive.open_group(taken).trajectories
    ]
    columns = (frame["loss_mask"].map(sum), *(frame[name].map(list) for name in ("token_ids", "logprobs", "versions")))
    assert list(zip(*columns, strict=True)) == trained
    found = datasets.Dataset.from_parquet(str(file), cache_dir=str(file.parent / "cache"))
    assert len(found) == len(archived) and set(FIXED) <= set(found.column_names)
    one = file.with_name("one.parquet")
    assert "32 trajectories" in CliRunner().invoke(
        cli.app, ["rollouts", str(run.folder), "--step", "2", "--export", str(one)]
    ).output  # fmt: skip
    assert set(pandas.read_parquet(one)["step"]) == {2}


def test_an_async_judge_beside_another_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{port}/v1")
    judge = [f"programs.judge.command=python judge_server.py {port}", f"programs.judge.ready=tcp://127.0.0.1:{port}"]
    run, _ = run_copy("async-judge", tmp_path, *judge)
    assert (run.folder / "logs" / "program-judge.stderr").is_file()
    with socket.socket() as asked:
        assert asked.connect_ex(("127.0.0.1", port)), "it has ended with the run"
    for row in steps_of(run.folder):
        assert row["reward"] == pytest.approx(row["reward/judge"] + 0.1 * row["reward/brief"], abs=1e-5)
    assert any(row.get("latency/reward/judge", 0) > 0.2 for row in steps_of(run.folder))


def test_own_loss_and_own_advantage(tmp_path: Path) -> None:
    run, _ = run_copy("own-loss", tmp_path)
    rows = steps_of(run.folder)
    assert all("bounded_share" in row for row in rows)
    assert all("clip_fraction" not in row for row in rows)


@pytest.mark.chaos
def test_own_correction(tmp_path: Path) -> None:
    run, _ = run_copy("own-correction", tmp_path)
    assert all(0 < row["is_weight_kept"] <= 1 for row in steps_of(run.folder))


def test_own_environment(tmp_path: Path) -> None:
    run, _ = run_copy("own-environment", tmp_path)
    rows = steps_of(run.folder)
    assert all(1 <= row["turns"] <= 2 and row["reward/environment"] == pytest.approx(row["reward"]) for row in rows)
    kept = read_lines(run.folder / "samples.jsonl")
    assert kept and all(row["reward/environment"] == row["reward"] for row in kept)


def test_a_judge_that_is_not_there_is_told_of_before_anything_starts(tmp_path: Path) -> None:
    env = {**os.environ, "JUDGE_URL": "http://127.0.0.1:9/v1"}
    command = [sys.executable, "-m", "penstock.pipeline.cli", "run", str(EXAMPLES / "async-judge" / "config.yaml")]
    command.append(f"run.folder={tmp_path}")
    told = subprocess.run([*command, "programs={}"], env=env, capture_output=True, text=True, timeout=60)
    assert told.returncode == 2 and not list(tmp_path.iterdir())
    assert "reward.functions.0: my_judge:judge" in told.stderr and "ConnectError" in told.stderr
    command += ["--dry-run", "programs.judge.gpus=1000"]
    told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0 and "# on this machine: programs: they want 1000 GPUs" in told.stdout
