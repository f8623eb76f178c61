"""What the page has of a run's folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from penstock.pipeline.cli import app
from penstock.pipeline.config import ConfigError
from penstock.pipeline.config import load as load_config
from penstock.pipeline.models.tiny import ALPHABET, make_tokenizer
from penstock.pipeline.page import data
from penstock.pipeline.page.alerts import alerts
from penstock.pipeline.page.build import whole
from penstock.pipeline.page.data import by_column, evenly, run_data
from penstock.pipeline.page.rollouts import groups_of
from penstock.pipeline.page.server import make_app
from penstock.pipeline.run import summary
from penstock.protocols.experience import Group, Prompt, Trajectory, as_bytes
from penstock.protocols.messages import Batch, TakenGroup
from penstock.protocols.packed_groups import pack_group
from penstock.services.broker.archive import Archive, open_group
from penstock.services.learning.batch import TrainingBatch
from penstock.services.modeling.parallel.world import World
from penstock.services.trainer.algorithms.compose import Part
from penstock.services.trainer.judgements import Judgements

CONFIG = """
model: {type: tiny}
prompts: {train: {type: sort}}
trainer: {steps: 3, algorithm: {kl: {coefficient: 0.001}}}
"""
NASTY = "sort </script><script>alert(1)</script>="


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of three steps, with an archive of two."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    make_tokenizer(set(ALPHABET)).save_pretrained(tmp_path / "model")
    steps = [
        {"kind": "step", "step": i, "time": 1795475882.123456 + i, "reward": i / 3, "lag_mean": 0.5} for i in range(3)
    ]
    steps[1]["critic_loss"], steps[2]["reward"] = 0.25, math.nan
    lines(
        tmp_path / "metrics.jsonl", [*steps, {"kind": "eval", "step": 0, "label": "before", "sets": {"held_out": 0.5}}]
    )
    beat = {"kind": "trainer", "pid": 7, "busy": 0.5}
    lines(
        tmp_path / "actors.jsonl",
        [
            {"time": 1.0 * i, "actors": {"trainer": beat | {"pid": 7 + i // 2000}} if i else {}, "queues": {"ready": i}}
            for i in range(4000)
        ],
    )
    lines(tmp_path / "weights.jsonl", [{"time": 5.0, "receiver": "rollout-0", "version": 1, "pause_s": 0.001}])
    archive = Archive(tmp_path, "all")
    for step in (1, 2):
        archive.append(Batch(step=step, seed=0, max_lag=2, groups=[taken(step)], committed=step), "digest")
    return tmp_path


def taken(step: int) -> TakenGroup:
    tokens = np.array([5, 6, 7, 8, 1], np.int32)
    mask = np.array([0, 0, 1, 1, 1], np.uint8)
    versions = np.where(mask == 1, step - 1, -1).astype(np.int32)
    logprobs = np.where(mask == 1, -0.5, 0).astype(np.float32)
    one = Trajectory(tokens, mask, logprobs, versions, text="ab", finish="stop")
    group = Group(step, Prompt(index=0, text=NASTY, truth="ab"), [one, one])
    reference = np.concatenate([np.full(5, -1.0), np.full(5, -2.0)]).astype(np.float32)
    columns = {"reward": np.array([1.0, math.nan], np.float32), "reference": reference}
    return TakenGroup(number=step, experience=as_bytes(pack_group(group)), columns=columns)


def test_numbers_come_by_column_and_are_ones_that_json_has(folder: Path) -> None:
    found = run_data(folder)
    assert found["steps"]["step"] == [0, 1, 2] and found["steps"]["reward"] == [0.0, 0.333333, None]
    assert found["steps"]["critic_loss"] == [None, 0.25, None] and found["steps"]["time"][0] == 1795475882.123
    assert found["evaluations"] == [{"step": 0, "label": "before", "sets": {"held_out": 0.5}}]
    beats = found["beats"]
    assert len(beats["time"]) <= 1500 and set(beats["actors"]["trainer"]["pid"]) == {None, 7, 8}
    assert run_data(folder, after=1)["steps"]["step"] == [2]
    assert by_column([]) == {} and evenly(range(100), 3) == [0, 50, 99]


def test_rollouts_come_token_by_token(folder: Path) -> None:
    groups = groups_of(folder)
    assert [group["step"] for group in groups] == [1, 2]
    member = groups[1]["members"][1]
    assert member["reward"] is None and member["mask"] == [0, 1, 1, 1] and member["lag"] == [-1, 1, 1, 1]
    assert member["logprob"] == [None, -0.5, -0.5, -0.5]
    assert member["by_token"]["reference"] == [None, -2.0, -2.0, -2.0]
    assert member["tokens"][-1] == "<eos>" and all(len(text) == 1 for text in member["tokens"][:-1])
    kept = [("tokens" in group["members"][0]) for group in groups_of(folder, tokens=10)]
    assert kept == [False, True], "the newest have room first, and the others their texts"
    (folder / "model" / "tokenizer.json").unlink()
    assert "tokens" not in groups_of(folder)[0]["members"][0], "numbers tell nobody anything"


def test_branches_of_a_session_hang_on_what_they_go_on_from(folder: Path) -> None:
    def branch(tokens: list[int], mask: list[int], session: int) -> Trajectory:
        said = np.array(mask, np.uint8)
        versions, logprobs = (
            np.where(said == 1, 2, -1).astype(np.int32),
            np.where(said == 1, -0.5, 0).astype(np.float32),
        )
        return Trajectory(
            np.array(tokens, np.int32), said, logprobs, versions, session=session, metrics={"calls": float(session)}
        )

    told = [
        branch([5, 6, 7, 8, 9, 10], [0, 0, 1, 1, 0, 1], 0),
        branch([5, 6, 7, 8, 11, 12], [0, 0, 0, 0, 0, 1], 0),
        branch([20, 21], [0, 1], 0),
        branch([5, 6, 7, 8], [0, 0, 1, 1], 1),
    ]
    group = Group(9, Prompt(index=0, text="sort ba=", truth="ab"), told)
    columns = {"reward": np.array([1, 1, 1, 0], np.float32), "reference": np.zeros(18, np.float32)}
    row = TakenGroup(number=9, experience=as_bytes(pack_group(group)), columns=columns)
    Archive(folder, "all").append(Batch(step=3, seed=0, max_lag=2, groups=[row], committed=3), "digest")
    first, second, third, other = groups_of(folder)[-1]["members"]
    assert "parent" not in first and first["mask"] == [0, 1, 1, 0, 1] and first["session"] == 0
    assert (second["parent"], second["shared"], second["mask"]) == (0, 4, [0, 1])
    assert (third["parent"], third["shared"], third["mask"]) == (0, 0, [0, 1])
    assert "parent" not in other and other["session"] == 1 and other["agent/calls"] == 1.0


def test_without_an_archive_the_samples_are_shown(folder: Path) -> None:
    for path in (folder / "archive").iterdir():
        path.unlink()
    assert groups_of(folder) == []
    row = {
        "step": 4,
        "group": 9,
        "sample": 0,
        "prompt": "p",
        "response": "r",
        "truth": None,
        "tokens": 3,
        "reward": 1.0,
    }
    lines(folder / "samples.jsonl", [row, row | {"sample": 1}])
    (group,) = groups_of(folder)
    assert [member["sampled"] for member in group["members"]] == [3, 3]


def test_nothing_that_a_run_says_is_read_as_markup(folder: Path) -> None:
    page = whole([folder], 1000, {folder: {"outcome": "complete", "look_at_this": [NASTY]}})
    assert NASTY not in page and page.count("</script>") == 2 and "{{" not in page.split("<script>")[0]
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["runs"][0]["summary"]["look_at_this"] == [NASTY]
    assert data["runs"][0]["groups"][0]["prompt"] == NASTY
    assert "http://" not in page.replace("http://www.w3.org", "") and "src=" not in page, "it needs no other file"


def test_a_live_page_asks_for_what_is_new(folder: Path) -> None:
    client = TestClient(make_app([folder]))
    assert '"live":true' in client.get("/").text
    assert client.get("/runs/0?after=0").json()["steps"]["step"] == [1, 2]
    assert len(client.get("/runs/0/groups").json()) == 2
    assert client.get("/runs/1").status_code == 404


def test_the_command_writes_one_file_and_knows_a_run(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["page", str(folder), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 0 and (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    wrong = CliRunner().invoke(app, ["page", str(tmp_path / "nowhere")])
    assert isinstance(wrong.exception, ConfigError) and "is not a run's folder" in str(wrong.exception)


def beat(time: float, pid: int = 7, silent_s: float = 0.1, **more: Any) -> dict[str, Any]:
    member = {"kind": "rollout", "pid": pid, "silent_s": silent_s}
    return {"time": time, "actors": {"rollout-0": member, **more}, "queues": {"leased": 8, "ready": 0}}


def seconds(first: int, last: int) -> list[dict[str, Any]]:
    return [beat(float(second)) for second in range(first, last + 1)]


def step(number: int, **values: Any) -> dict[str, Any]:
    usual = {"reward": 0.5, "grad_norm": 1.0, "wait_s": 0.5, "train_step_s": 0.5}
    return {"step": number, "time": 100.0 + number} | usual | values


QUIET = [step(number) for number in range(30)]
NOW = 130.0


@pytest.mark.parametrize(
    "said, steps, beats",
    [
        ("noted nothing for 50 s", QUIET, [beat(80.0)]),
        ("rollout-1 was there less than 60 s ago", QUIET, [beat(100.0, **{"rollout-1": {"pid": 1}}), beat(129.0)]),
        ("rollout-0 is not heard of for 20 s", QUIET, [beat(129.0, silent_s=20.0)]),
        ("rollout-0 has died within", QUIET, [beat(120.0), beat(129.0, pid=8)]),
        ("no step was completed for 121 s (usually 1.0 s); groups: 8 leased", QUIET[:10], seconds(100, 229)),
        ("2 of the last 10 steps changed no weight", [*QUIET, step(30, skipped=1), step(31, skipped=1)], []),
        ("disagreed in 10 of the last 10", [step(n, mismatch_kl_k3=0.2, mismatch_bound=0.1) for n in range(30)], []),
        (
            "0.2 in the last 10 steps, 0.9 at its best",
            [step(n, reward=[0.1, 0.9, 0.2][n // 10]) for n in range(30)],
            [],
        ),
        ("a gradient of norm 30", [*QUIET, step(30, grad_norm=30.0)], []),
    ],
)
def test_a_page_says_what_one_should_look_at(
    said: str, steps: list[dict[str, Any]], beats: list[dict[str, Any]]
) -> None:
    config = load_config(Path("configs/quickstart.yaml"), ["trainer.steps=100"])
    now = (beats[-1]["time"] + (50 if "noted" in said else 1)) if beats else NOW
    (found,) = alerts(config, steps, beats, now)
    assert said in found


def test_a_page_has_nothing_to_say_of_a_run_that_goes_well() -> None:
    config = load_config(Path("configs/quickstart.yaml"), ["trainer.steps=100"])
    better = [step(number, reward=math.nan if number == 3 else number / 30) for number in range(30)]
    assert alerts(config, better, [beat(129.0)], NOW) == []
    assert alerts(config, [], [], NOW) == []
    noise = np.random.default_rng(0)
    for _ in range(50):
        flat = [step(number, reward=float(noise.normal(0.5, 0.03))) for number in range(100)]
        assert not [said for said in alerts(config, flat, [], NOW) if "fallen" in said]
    resumed = [beat(1000.0), beat(90_000.0), beat(90_001.0)]
    assert alerts(config, QUIET, resumed, 90_002.0) == [], "the last step is of the day before"
    assert "no step was completed for 899 s" in alerts(config, [], seconds(101, 1000), 1000.0)[0]


def test_what_the_trainer_made_of_tokens_is_on_the_page(folder: Path) -> None:
    both = open_group(taken(2)).trajectories
    values = {"reward": np.array([1.0, math.nan], np.float32)}
    judgements = Judgements(TrainingBatch(both, np.array([2, 2]), np.array([0, 1]), values, {}))
    part = Part(torch.full((1, 4), -0.25), torch.zeros(1, 4), torch.full((1, 4), 2.0), torch.ones(1, 4, dtype=bool))
    judgements.note([0], part)
    judgements.write(folder / "archive", 2, "all", World(torch.device("cpu")))
    first, second = groups_of(folder)[-1]["members"]
    assert first["by_token"]["trainer_logprobs"] == [None, -0.25, -0.25, -0.25]
    assert first["by_token"]["advantages"] == [None, 2.0, 2.0, 2.0]
    assert second["by_token"]["trainer_logprobs"] == [None] * 4, "it has no reward, and no part in the loss"
    assert "trainer_logprobs" not in groups_of(folder)[0]["members"][0]["by_token"], "of step 1 nothing is noted"


def test_of_a_long_run_few_rows_are_taken_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row a second: all of them at once would take gigabytes after a week."""
    path = tmp_path / "actors.jsonl"
    path.write_text("".join(f'{{"time": {second}, "actors": {{}}, "queues": {{}}}}\n' for second in range(20_000)))
    seen: list[str] = []

    def loads(line: str) -> Any:
        seen.append(line)
        return read(line)

    read = json.loads
    monkeypatch.setattr(summary.json, "loads", loads)
    beats, last = data._beats_of(path)
    assert len(beats) <= data.BEATS and beats[0]["time"] == 0 and beats[-1]["time"] > 19_900
    assert [beat["time"] for beat in last] == list(range(20_000 - data.LATEST, 20_000))
    assert len(seen) <= data.BEATS + data.LATEST
