"""A run's folder, taken back to an earlier checkpoint."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.pipeline.cli import app
from penstock.pipeline.config import dump, load
from penstock.pipeline.run import lock
from penstock.services.runtime.lines import read_lines
from tests.e2e.runs import QUICKSTART

REFERENCE = "reference: {refresh_every: 200}\ntrainer: {algorithm: {kl: {coefficient: 0.1}}, checkpoint: {every: 100}}"


def test_what_was_later_is_set_aside_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "one"
    for name in (
        "checkpoints/step-000005",
        "checkpoints/step-000010",
        "critic/checkpoints/step-000011",
        "redis/aof",
        "reference/step-000006",
    ):
        (run / name).mkdir(parents=True)
    (run / "archive").mkdir()
    for step in range(12):
        (run / "archive" / f"step-{step:06d}.msgpack").touch()
    (run / "config.yaml").write_text(QUICKSTART.read_text())
    (run / "summary.json").write_text("{}")
    steps = [{"kind": "step", "step": step} for step in range(12)]
    rows = {
        "metrics.jsonl": [*steps, {"kind": "eval", "step": 5}, {"kind": "eval", "step": 6}],
        "ledger.jsonl": [{"step": step, "groups": [step]} for step in range(12)],
        "critic.jsonl": [{"critic_step": float(step)} for step in range(12)],
        "eval_samples.jsonl": [{"set": "held_out", "step": step} for step in (0, 5, 10)],
        "dropped.jsonl": [{"group": 3}, {"group": 7}],
        "logs/rollout-0.finished.jsonl": [{"group": group} for group in range(12)],
    }
    (run / "logs").mkdir()
    for name, lines in rows.items():
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def told(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["rollback", *arguments])
        return f"{done.output}{done.exception}".replace("\n", " ")

    assert "it has 5, 10" in told(str(run), "7") and "no run's folder" in told(str(tmp_path), "5")
    assert not (run / "set-aside").exists()
    assert "back at version 5" in told(str(run), "5")
    (aside,) = (run / "set-aside").iterdir()
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-000005"}
    assert not any(
        (run / name).exists()
        for name in ("redis", "summary.json", "critic/checkpoints/step-000011", "reference/step-000006")
    )
    assert len(list((run / "archive").iterdir())) == 5 and len(list((aside / "archive").iterdir())) == 7
    assert [row["step"] for row in read_lines(run / "ledger.jsonl")] == list(range(5))
    assert [row["step"] for row in read_lines(run / "metrics.jsonl")] == [*range(5), 5]
    assert len(read_lines(run / "critic.jsonl")) == 5
    assert [row["step"] for row in read_lines(run / "eval_samples.jsonl")] == [0, 5]
    assert read_lines(run / "dropped.jsonl") == [{"group": 3}]
    assert [row["group"] for row in read_lines(run / "logs" / "rollout-0.finished.jsonl")] == list(range(5))
    assert all(read_lines(aside / name) == lines for name, lines in rows.items())
    aside = aside.rename(run / "set-aside" / "first")
    assert "back at version 5" in told(str(run), "5"), "its store is set aside already"
    shutil.rmtree(run / "set-aside")
    refused = told(str(run), "5")
    assert "is not in its folder (PENSTOCK_STORE), and knows of later steps" in refused and "--new-store" in refused
    (run / "actors.jsonl").write_text("{}\n")
    broker = threading.Timer(0.3, lambda: (run / "actors.jsonl").write_text("{}\n{}\n"))
    broker.start()
    assert "is going on: stop it first" in told(str(run), "5", "--new-store")
    monkeypatch.setattr(lock, "LIVE_S", 0.5)
    assert "back at version 5" in told(str(run), "5", "--new-store"), "its last line is new, and nobody writes another"


def test_a_reference_that_has_moved_on_for_ever_is_told_of(tmp_path: Path) -> None:
    for name in ("checkpoints/step-000005", "checkpoints/step-000010", "reference/step-000010"):
        (tmp_path / name).mkdir(parents=True)
    checkpoints = "trainer.checkpoint={every: 5, keep_every: 5}"
    given = ["trainer.algorithm.kl.coefficient=0.1", "reference.mix=0.5", "reference.refresh_every=5", checkpoints]
    (tmp_path / "config.yaml").write_text(dump(load(QUICKSTART, given)))
    assert CliRunner().invoke(app, ["rollback", str(tmp_path), "5"]).exit_code == 0, "it is made again of 5 alone"
    (tmp_path / "checkpoints" / "step-000010").mkdir()
    (tmp_path / "checkpoints" / "step-000005").rmdir()
    done = CliRunner().invoke(app, ["rollback", str(tmp_path), "10"])
    assert "is made of that of 5, which is not kept" in f"{done.output}{done.exception}"


@pytest.mark.parametrize(
    ("overrides", "critics", "why"),
    [
        ("trainer: {algorithm: {preset: ppo}}", (), "the critic has no checkpoint of version 500, nor of the 200"),
        ("trainer: {algorithm: {preset: ppo}}", (300, 600), "it has 300, 600"),
        ("trainer: {algorithm: {preset: ppo}}", (400, 600), "the critic goes on as it was at version 400"),
        ("trainer: {algorithm: {preset: ppo}}", (500,), "back at version 500"),
        (REFERENCE, (), "the reference of version 500 is that of 400, which is not kept any more; versions with"),
    ],
)  # fmt: skip
def test_what_others_would_lack_is_told_before(
    tmp_path: Path, overrides: str, critics: tuple[int, ...], why: str
) -> None:
    for name in ["checkpoints/step-000500", *(f"critic/checkpoints/step-{each:06d}" for each in critics)]:
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(
        "model: {type: tiny}\nprompts: {train: {type: sort}}\n"
        f"rollout: {{engine: {{type: torch, max_length: 32}}, sampling: {{max_new_tokens: 12}}}}\n{overrides}\n"
    )
    done = CliRunner().invoke(app, ["rollback", str(tmp_path), "500"])
    assert why in f"{done.output}{done.exception}".replace("\n", " ")
    assert (tmp_path / "set-aside").exists() == (done.exit_code == 0)


def test_to_one_that_has_the_model_alone_there_is_no_way_back(tmp_path: Path) -> None:
    for version in (100, 200, 300):
        state = tmp_path / "checkpoints" / f"step-{version:06d}" / "trainer"
        (state / "optimizer" if version == 300 else state).mkdir(parents=True)
        (state / "state.json").write_text('{"optimizer": true}')
    (tmp_path / "config.yaml").write_text(dump(load(QUICKSTART, [])))
    done = CliRunner().invoke(app, ["rollback", str(tmp_path), "200"])
    said = f"{done.output}{done.exception}"
    assert "keep_optimizer" in said and "can be taken back to 300" in said and not (tmp_path / "set-aside").exists()
    assert CliRunner().invoke(app, ["rollback", str(tmp_path), "300"]).exit_code == 0
