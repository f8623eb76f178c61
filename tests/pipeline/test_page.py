"""What the page has of a run's folder."""

from __future__ import annotations

import json
import math
import os
import resource
import socket
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from tokenizers import Tokenizer
from typer.testing import CliRunner, Result

from penstock.pipeline.cli import app
from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.models.characters import ALPHABET
from penstock.pipeline.models.tiny import make_tokenizer
from penstock.pipeline.page import beats as page_beats
from penstock.pipeline.page import data as page_data
from penstock.pipeline.page import rollouts as page_rollouts
from penstock.pipeline.page import server as page_server
from penstock.pipeline.page.beats import Beats
from penstock.pipeline.page.build import whole
from penstock.pipeline.page.data import RunFiles, by_column, evenly
from penstock.pipeline.page.rollouts import groups_of
from penstock.pipeline.page.server import make_app
from penstock.pipeline.page.texts import Texts
from penstock.pipeline.run import summary
from penstock.protocols.experience import Group, Prompt, Trajectory, as_bytes
from penstock.protocols.messages import Batch, TakenGroup
from penstock.protocols.packed_groups import pack_group
from penstock.services.broker.archive import Archive, open_group, read
from penstock.services.learning.batch import TrainingBatch
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime.files import write_whole
from penstock.services.trainer.algorithms.compose import Part
from penstock.services.trainer.judgements import Judgements
from tests.rollout.test_stop_texts import bytewise, letter, with_bytes_to_fall_back_on
from tests.rollout.test_tokenizer import numbered

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
        tmp_path / "metrics.jsonl",
        [
            *steps,
            {
                "kind": "eval",
                "step": 0,
                "time": 1795475880.0,
                "label": "before",
                "reward": 0.5,
                "sets": {"held_out": 0.5},
            },
        ],
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
    found = RunFiles(folder).data()
    assert found["steps"]["step"] == [0, 1, 2] and found["steps"]["reward"] == [0.0, 0.333333, None]
    assert found["steps"]["critic_loss"] == [None, 0.25, None] and found["steps"]["time"][0] == 1795475882.123
    assert found["evaluations"] == [{"step": 0, "label": "before", "sets": {"held_out": 0.5}, "parts": {}}]
    beats = found["beats"]
    assert len(beats["time"]) <= 1500 and set(beats["actors"]["trainer"]["pid"]) == {None, 7, 8}
    assert found["sampled"] == []
    drawn = "sort}, eval: {aime: {type: sort}}, eval_sampling: {aime: {n: 2, temperature: 1}}}"
    (folder / "config.yaml").write_text(CONFIG.replace("sort}}", drawn))
    assert RunFiles(folder).data()["sampled"] == ["aime"]
    assert by_column([]) == {} and evenly(range(100), 3) == [0, 50, 99]


def test_rollouts_come_token_by_token(folder: Path) -> None:
    groups = groups_of(folder)
    assert [group["step"] for group in groups] == [1, 2]
    member = groups[1]["members"][1]
    assert member["reward"] is None and member["mask"] == [0, 1, 1, 1] and member["lag"] == [-1, 1, 1, 1]
    assert member["logprob"] == [None, -0.5, -0.5, -0.5]
    assert member["by_token"]["reference"] == [None, -2.0, -2.0, -2.0]
    assert member["tokens"][-1] == "<eos>" and all(len(text) == 1 for text in member["tokens"][:-1])
    old, new = groups_of(folder, tokens=10)
    assert "tokens" not in old["members"][0] and "tokens" in new["members"][0], "the newest have room first"
    assert "room for those of newer groups" in old["untold"] and "untold" not in new


def test_who_has_the_runs_folder_alone_reads_tokens_by_a_checkpoint(folder: Path) -> None:
    file, checkpoint = folder / "model" / "tokenizer.json", folder / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    file.rename(checkpoint / file.name)
    for elsewhere in ("{type: tiny}", "{type: pretrained, path: /gone/Qwen3-0.6B}"):
        (folder / "config.yaml").write_text(CONFIG.replace("{type: tiny}", elsewhere))
        assert groups_of(folder)[0]["members"][0]["tokens"][-1] == "<eos>"
    (checkpoint / file.name).unlink()
    (group, _) = groups_of(folder)
    assert "tokens" not in group["members"][0], "numbers tell nobody anything"
    assert "neither the model's tokenizer.json is on this machine nor a checkpoint's" in group["untold"]


WORDS = "ab ab é你\n好"


@pytest.mark.parametrize(
    ("made", "tokens", "adds"),
    [
        (with_bytes_to_fall_back_on, ["▁a", "b", "▁", "ab", "▁é", *numbered("你"), "\n", *numbered("好")],
         ["a", "b", " ", "ab", " é", "", "", "你", "\n", "", "", "好"]),
        (bytewise, [letter(byte) for byte in WORDS.encode()],
         ["a", "b", " ", "a", "b", " ", "", "é", "", "", "你", "\n", "", "", "好"]),
    ],
)  # fmt: skip
def test_tokens_say_together_what_the_answer_says(
    folder: Path, made: Callable[[], Tokenizer], tokens: list[str], adds: list[str]
) -> None:
    """Spaces that a decoder leaves out where a text begins, and characters of several tokens."""
    tokenizer = made()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    texts, ids = Texts(load(folder / "config.yaml"), folder), [tokenizer.token_to_id(token) for token in tokens]
    assert texts.of(np.array(ids), np.ones(len(ids), int)) == adds
    broken = [*ids[:-3], *10 * [ids[-2]], ids[0], 10_000]
    found = texts.of(np.array(broken), np.ones(len(broken), int))
    assert "".join(found).replace(" a[", "a[") == WORDS[:-1] + 10 * "\ufffd" + "a[10000]"


def test_branches_of_a_session_hang_on_what_they_go_on_from(folder: Path) -> None:
    def branch(tokens: list[int], mask: list[int], session: int, pictures: tuple[bytes, ...] = ()) -> Trajectory:
        said = np.array(mask, np.uint8)
        versions, logprobs = (
            np.where(said == 1, 2, -1).astype(np.int32),
            np.where(said == 1, -0.5, 0).astype(np.float32),
        )
        return Trajectory(
            np.array(tokens, np.int32), said, logprobs, versions, session=session, metrics={"calls": float(session)},
            pictures=pictures,
        )  # fmt: skip

    told = [
        branch([5, 6, 7, 8, 9, 10], [0, 0, 1, 1, 0, 1], 0),
        branch([5, 6, 7, 8, 11, 12], [0, 0, 0, 0, 0, 1], 0),
        branch([20, 21], [0, 1], 0),
        branch([5, 6, 7, 8], [0, 0, 1, 1], 1),
        branch([5, 6, 7, 8, 9, 10], [0, 0, 1, 1, 0, 1], 1, (b"a", b"b")),
        branch([5, 6, 7, 8, 9, 11], [0, 0, 0, 0, 0, 1], 1, (b"b", b"c")),
    ]
    group = Group(9, Prompt(index=0, text="sort ba=", truth="ab"), told)
    columns = {"reward": np.array([1, 1, 1, 0, 0, 0], np.float32), "reference": np.zeros(30, np.float32)}
    row = TakenGroup(number=9, experience=as_bytes(pack_group(group)), columns=columns)
    Archive(folder, "all").append(Batch(step=3, seed=0, max_lag=2, groups=[row], committed=3), "digest")
    first, second, third, other, shows, otherwise = groups_of(folder)[-1]["members"]
    assert "parent" not in first and first["mask"] == [0, 1, 1, 0, 1] and first["session"] == 0
    assert (second["parent"], second["shared"], second["mask"]) == (0, 4, [0, 1])
    assert (third["parent"], third["shared"], third["mask"]) == (0, 0, [0, 1])
    assert "parent" not in other and other["session"] == 1 and other["agent/calls"] == 1.0
    assert (shows["parent"], shows["shared"]) == (3, 4) and otherwise["parent"] == 3, "no branch of what shows others"


def test_a_step_that_is_removed_meanwhile_is_left_out(folder: Path) -> None:
    Archive(folder, "all").append(Batch(step=3, seed=0, max_lag=2, groups=[taken(3)], committed=3), "digest")
    found = read(folder)
    assert next(found)[0].step == 1
    (folder / "archive" / "step-000002.msgpack").unlink()  # as replay.archive: 2 does
    assert [batch.step for batch, _ in found] == [3]


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


def test_all_steps_are_shown_while_there_is_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_rollouts, "STEPS", 2)
    for step in range(3, 7):
        Archive(folder, "all").append(Batch(step=step, seed=0, max_lag=2, groups=[taken(step)], committed=step), "x")
    row = {"sample": 0, "prompt": NASTY, "response": "r" * 100, "truth": None, "tokens": 3, "reward": 1.0}
    lines(folder / "samples.jsonl", [row | {"step": step, "group": 10 * step} for step in (0, 2, 7, 8)])

    def shown(**room: int) -> list[int]:
        return [group["step"] for group in groups_of(folder, **room)]

    assert shown() == list(range(9)), "archived ones, and those that samples.jsonl has of others"
    assert shown(groups=4) == [1, 4, 5, 6], "first a few from end to end, then the newest"
    assert shown(groups=7) == [*range(1, 7), 8]
    assert shown(groups=4, newest=2) == [1, 4, 5, 6] and shown(groups=5, newest=4) == [1, 3, 4, 5, 6]
    monkeypatch.setattr(page_server, "GROUPS", 4)
    monkeypatch.setattr(page_rollouts, "STEPS", 40)
    live = TestClient(make_app([folder])).get("/runs/0/groups").json()
    assert [group["step"] for group in live] == [1, 4, 5, 6], "half of them without a gap, half from end to end"
    monkeypatch.setattr(page_rollouts, "STEPS", 2)
    asked = len(groups_of(folder)[1]["asked"])
    each = len(NASTY) + asked + len('"ab"') + 2 * (len("ab") + page_rollouts.ABOUT)
    assert shown(letters=3 * each) == [1, 5, 6] and shown(letters=1) == [6]
    assert shown(letters=6 * each + 500) == [*range(1, 7), 8] and shown(letters=6 * each) == [*range(1, 7)]


def test_nothing_that_a_run_says_is_read_as_markup(folder: Path) -> None:
    (folder / "summary.json").write_text(json.dumps({"outcome": "complete", "look_at_this": [NASTY]}))
    page = whole([folder])
    assert NASTY not in page and page.count("</script>") == 2 and "{{" not in page.split("<script>")[0]
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["runs"][0]["summary"]["look_at_this"] == [NASTY]
    assert data["runs"][0]["groups"][0]["prompt"] == NASTY
    assert "http://" not in page.replace("http://www.w3.org", "") and "src=" not in page, "it needs no other file"


def test_a_live_page_asks_for_what_is_new(folder: Path) -> None:
    client = TestClient(make_app([folder]))
    assert '"live":true' in client.get("/").text
    first = client.get("/runs/0").json()
    assert first["steps"]["step"] == [0, 1, 2] and len(first["evaluations"]) == len(first["loads"]["version"]) == 1
    again = client.get("/runs/0", params=first["seen"]).json()
    assert (again["steps"], again["evaluations"], again["loads"]) == ({}, [], {}) and again["seen"] == first["seen"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(f'{{"kind": "step", "step": {n}, "reward": {n / 4}}}\n' for n in (2, 3)) + '{"kind": "st')
    with (folder / "weights.jsonl").open("a") as file:
        file.write('{"time": 6.0, "receiver": "rollout-0", "version": 2, "pause_s": 0.001}\n')
    new = client.get("/runs/0", params=again["seen"]).json()
    assert new["steps"]["step"] == [2, 3] and new["steps"]["reward"] == [0.5, 0.75], "step 2 was done again"
    assert new["loads"]["version"] == [2] and new["seen"]["metrics"] < (folder / "metrics.jsonl").stat().st_size
    (folder / "config.yaml").write_text(CONFIG.replace("steps: 3", "steps: 9"))
    assert client.get("/runs/0", params=new["seen"]).json()["wanted"] == 9
    assert len(client.get("/runs/0/groups").json()) == 2
    assert client.get("/runs/1").status_code == 404


def test_of_beats_those_that_are_new_are_sent(folder: Path) -> None:
    client = TestClient(make_app([folder]))
    first = client.get("/runs/0").json()
    lines_more = [
        {"time": 4000.0 + i, "actors": {"new": {"kind": "rollout", "pid": i}}, "queues": {}} for i in range(9)
    ]
    with (folder / "actors.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in lines_more))
    new = client.get("/runs/0", params=first["seen"]).json()["beats"]
    assert new["behind"] == len(first["beats"]["time"]) and new["time"] == [4002.0, 4005.0, 4008.0], "every third"
    assert new["actors"]["new"]["pid"] == [2, 5, 8] and "trainer" not in new["actors"]
    assert new["sessions"] == first["beats"]["sessions"]
    again = TestClient(make_app([folder])).get("/runs/0", params=first["seen"]).json()["beats"]
    assert again["behind"] == 0 and again["time"][-1] == 4008.0, "by another server, which may have kept others"


def test_runs_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "b" / "first"]
    for run in runs:
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(CONFIG)
    page = whole(runs)
    assert [run["name"] for run in json.loads(page.split('id="data">')[1].split("</script>")[0])["runs"]] == [
        "a/run", "b/run", "first",
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path / "b")
    assert "<title>a/run, b/run · " in TestClient(make_app([Path("../a/run"), Path("run")])).get("/").text
    assert "<title>run, run · " in whole([runs[0]] * 2), "one and the same"


def test_a_page_that_is_open_asks_for_its_own_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "config.yaml").write_text(CONFIG)
    client, seen = TestClient(make_app([other])), TestClient(make_app([folder])).get("/runs/0").json()
    for path in ("/runs/0", "/runs/0/groups"):
        assert client.get(path, params={"run": seen["id"]}).status_code == 409
    assert client.get("/runs/0", params={"run": client.get("/runs/0").json()["id"]}).status_code == 200


def test_a_run_that_cannot_be_read_costs_itself_alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "config.yaml").write_text(CONFIG)
    client = TestClient(make_app([other, folder]))
    own = client.get("/runs/0").json()["id"]
    (other / "config.yaml").write_text(CONFIG + "older: {}\n")
    data = json.loads(client.get("/").text.split('id="data">')[1].split("</script>")[0])
    assert [bool(run.get("unread")) for run in data["runs"]] == [True, False] and data["runs"][1]["steps"]["step"]
    assert data["runs"][0].keys() - {"unread"} == data["runs"][1].keys()
    assert f"{other} cannot be read" in client.get("/runs/0", params={"run": own}).json()["detail"]
    assert client.get("/runs/1").status_code == 200
    done = CliRunner().invoke(app, ["page", str(other)])
    assert isinstance(done.exception, ConfigError) and f"RUN: {other}: older" in str(done.exception)
    done = CliRunner().invoke(app, ["page", str(folder), str(other), "--out", str(other / "both.html")])
    assert done.exit_code == 0 and f"warning: RUN: {other}: older" in done.stderr
    data = json.loads((other / "both.html").read_text().split('id="data">')[1].split("</script>")[0])
    assert [bool(run.get("unread")) for run in data["runs"]] == [False, True] and data["runs"][0]["groups"]
    (other / "config.yaml").unlink()  # moved, say
    gone = client.get("/runs/0", params={"run": own})
    assert gone.status_code == 500 and f"{other} cannot be read" in gone.json()["detail"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--port", "99999"], "less than or equal to 65535"),
        (["--port", "-1"], "greater than or equal to 0"),
        (["--port", "{taken}"], "--host, --port: cannot listen on 127.0.0.1:{taken}: Address already in use"),
        (["--host", "no.such.host.invalid"], "--host, --port: cannot listen on no.such.host.invalid:8430: "),
    ],
)
def test_where_it_cannot_be_served_is_told_before_it_says_where(folder: Path, given: list[str], words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        done = CliRunner().invoke(app, ["page", str(folder), *(each.format(taken=taken) for each in given)])
    assert done.exit_code and "http://" not in done.output
    assert words.format(taken=taken) in " ".join(done.output.replace("│", "").split()) + str(done.exception)


def test_any_free_port_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[int] = []
    monkeypatch.setattr("penstock.pipeline.page.server.serve", lambda _, at: ports.append(at.getsockname()[1]))
    done = CliRunner().invoke(app, ["page", str(folder), "--port", "0"])
    assert done.output.startswith(f"http://127.0.0.1:{ports[0]}/ ") and ports[0]


def test_the_command_writes_one_file_and_knows_a_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, ["page", ".", "--out", str(tmp_path / "page.html")])
    assert f"<title>{folder.name}" in (tmp_path / "page.html").read_text()
    assert done.exit_code == 0 and (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    wrong = CliRunner().invoke(app, ["page", str(tmp_path / "nowhere")])
    assert isinstance(wrong.exception, ConfigError) and "is not a run's folder" in str(wrong.exception)


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


def empty(seconds: Iterable[int]) -> str:
    """Beats of nobody."""
    return "".join(f'{{"time": {second}, "actors": {{}}, "queues": {{}}}}\n' for second in seconds)


def test_of_a_long_run_few_rows_are_taken_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row a second: all of them at once would take gigabytes after a week."""
    path = tmp_path / "actors.jsonl"
    path.write_text(empty(range(20_000)))
    seen: list[bytes] = []

    def loads(line: bytes) -> Any:
        seen.append(line)
        return reading(line)

    reading = json.loads
    monkeypatch.setattr(summary.json, "loads", loads)
    file = Beats(path)
    kept, every = file.read()
    assert len(kept) <= page_beats.BEATS and kept[0]["time"] == 0 and kept[-1]["time"] > 19_900
    assert [row["time"] for row in every[-page_beats.LATEST :]] == list(range(20_000 - page_beats.LATEST, 20_000))
    assert all(earlier["time"] < later["time"] for earlier, later in pairwise(every))
    assert len(seen) <= page_beats.BEATS + page_beats.LATEST
    seen.clear()
    with path.open("a") as more:
        more.write(empty(range(20_000, 20_100)))
    kept, every = file.read()
    assert every[-1]["time"] == 20_099 and len(seen) < 2 * page_beats.LATEST, "what was read is not read again"
    write_whole(path, empty(range(0, 20_101, 50)))
    kept, every = file.read()
    assert len(kept) == 403 and every[-1]["time"] == 20_100 and every == kept, "the broker has thinned it"


def test_a_page_that_is_open_for_long_has_no_more_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_beats, "BEATS", 50)
    path = tmp_path / "actors.jsonl"
    path.touch()
    file, times = Beats(path), []
    for second in range(1000):
        with path.open("a") as more:
            more.write(empty([second]))
        kept, every = file.read()
        times = [row["time"] for row in kept]
        assert len(times) <= 100 and every[-1]["time"] == second
    assert times == list(range(0, 1000, 16))


def test_of_many_samples_the_newest_are_shown(tmp_path: Path) -> None:
    row = {"prompt": "p", "response": "r" * 99, "truth": None, "tokens": 3, "reward": 1.0}
    rows = [row | {"step": n // 4, "group": n // 2, "sample": n % 2} for n in range(40)]
    lines(tmp_path / "samples.jsonl", rows)
    (tmp_path / "config.yaml").write_text(CONFIG)
    assert [group["group"] for group in groups_of(tmp_path, groups=3)] == [17, 18, 19]
    found = groups_of(tmp_path, letters=450 + 4 * page_rollouts.ABOUT)
    assert [group["group"] for group in found] == [18, 19] and [len(group["members"]) for group in found] == [2, 2]
    whole, long = 4 * (99 + page_rollouts.ABOUT), {"tests": ["x" * 400_000]}
    lines(tmp_path / "samples.jsonl", [row | {"truth": long, "failure": "x" * 500} for row in rows])
    found = groups_of(tmp_path, letters=whole + 4 * 500 + 2 * page_rollouts.TRUTH + 500)
    assert [group["group"] for group in found] == [18, 19], "truths and what went wrong need room, too"
    assert found[0]["truth"].startswith('{"tests": ["xxx') and found[0]["truth"].endswith("… (cut: 400,015 characters)")
    assert len(json.dumps(found)) < 20_000


WRITES = (["page", "--out"], ["trace", "--out"], ["rollouts", "--export"])


@pytest.mark.parametrize(("command", "key"), WRITES)
def test_a_file_is_written_where_the_user_says(folder: Path, tmp_path: Path, command: str, key: str) -> None:
    def write(file: Path, run: Path = folder) -> Result:
        return CliRunner().invoke(app, [command, str(run), key, str(file)])

    new = tmp_path / "new" / "file"
    done = write(new)
    assert done.exit_code == 0 and new.is_file(), done.exception
    (tmp_path / "taken").write_text("")
    wrong = write(tmp_path / "taken" / "file")
    assert isinstance(wrong.exception, ConfigError) and f"{key}: cannot write to" in str(wrong.exception)
    missing = write(tmp_path / "empty" / "file", tmp_path / "no-run")
    assert "is not a run's folder" in str(missing.exception) and not (tmp_path / "empty").exists()

    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(new)
    new.write_text("")
    assert write(link).exit_code == 0 and link.is_symlink() and new.stat().st_size, "the file behind it is written"
    os.mkfifo(pipe)
    wrong = write(pipe)
    assert isinstance(wrong.exception, ConfigError) and f"{key}: {pipe} is no file" in str(wrong.exception)
    assert pipe.is_fifo()


@pytest.mark.parametrize(("command", "key"), WRITES)
def test_a_full_disk_is_one_sentence(folder: Path, tmp_path: Path, command: str, key: str) -> None:
    file, (soft, hard) = tmp_path / "file", resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
        done = CliRunner().invoke(app, [command, str(folder), key, str(file)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(done.exception, ConfigError) and f"{key}: cannot write {file}: " in str(done.exception)
    assert not [each.name for each in tmp_path.iterdir() if "file" in each.name], "and nothing of it is left"


def test_of_very_many_versions_every_second_or_third_is_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_data, "LOADED", 10)
    rows = [{"time": 1.0, "receiver": name, "version": v, "pause_s": 0.1} for v in range(12) for name in ("a", "b")]
    lines(folder / "weights.jsonl", rows)
    found = RunFiles(folder).data()
    assert found["loads"]["version"] == [0, 0, 3, 3, 6, 6, 9, 9] and found["loads"]["receiver"][:2] == ["a", "b"]
    assert RunFiles(folder).data(loads=found["seen"]["loads"])["loads"] == {}
