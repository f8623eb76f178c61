"""What is read out of an archive, where a run went on with other columns or a group is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import penstock
from penstock.pipeline.cli import app
from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.models.tiny import build
from penstock.pipeline.page.rollouts import groups_of
from penstock.pipeline.tools.recompute import redo
from penstock.pipeline.tools.rollouts import rollouts
from penstock.protocols import wire
from penstock.protocols.experience import PICTURE, Group, Prompt, Trajectory, as_bytes
from penstock.protocols.messages import Batch, TakenGroup
from penstock.protocols.packed_groups import pack_group
from penstock.services.broker.archive import Archive, ArchiveError
from penstock.services.data.config import SortData
from penstock.services.data.sort import SortSource
from penstock.services.trainer.judged import NAMES
from tests import shown

CONFIG: dict[str, Any] = {
    "model": {"type": "tiny", "hidden_size": 16, "layers": 1, "warm_start": {"steps": 0}},
    "prompts": {"train": {"type": "sort"}},
    "reward": {"functions": [{"function": "exact_match"}]},
    "trainer": {"steps": 3, "device": "cpu"},
}
WITH_REFERENCE = {**CONFIG, "trainer": {**CONFIG["trainer"], "algorithm": {"kl": {"coefficient": 0.001}}}}


def a_group(number: int, columns: dict[str, np.ndarray], text: str = "ab") -> TakenGroup:
    tokens = np.array([5, 6, 7, 8, 1], np.int32)
    mask = np.array([0, 0, 1, 1, 1], np.uint8)
    versions = np.where(mask == 1, 0, -1).astype(np.int32)
    one = Trajectory(tokens, mask, np.where(mask == 1, -0.5, 0).astype(np.float32), versions, text=text, finish="stop")
    group = Group(number, Prompt(index=0, text="sort ba=", truth="ab"), [one, one])
    return TakenGroup(number=number, experience=as_bytes(pack_group(group)), columns=columns)


def rewards() -> dict[str, np.ndarray]:
    values = np.array([1.0, 0.0], np.float32)
    return {"reward/exact_match": values, "reward": values}


def reference() -> dict[str, np.ndarray]:
    return {"reference": np.arange(-1, -11, -1).astype(np.float32)}


def run(folder: Path, config: dict[str, Any], *steps: list[TakenGroup]) -> Path:
    """The folder of a run with an archive of these ``steps``, which goes on with ``config``."""
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    archive = Archive(folder, "all")
    for step, groups in enumerate(steps):
        archive.append(Batch(step=step, seed=0, max_lag=2, groups=groups, committed=step), "digest")
    return folder


def test_a_column_that_was_dropped_on_the_way_is_told_as_it_was(tmp_path: Path) -> None:
    old = {**rewards(), **reference(), "reward/other": np.array([3.0, 4.0], np.float32)}
    old["reward/environment"] = np.arange(10, dtype=np.float32)
    folder = run(tmp_path, CONFIG, [a_group(0, old)], [a_group(1, rewards())])
    found = list(rollouts(folder))
    assert [row.get("reward/environment") for row in found] == [10.0, 35.0, None, None], "a reward counts by its sum"
    assert [row.get("reward/other") for row in found] == [3.0, 4.0, None, None]
    assert not any("reference" in row for row in found), "it has a value for each token"
    pq = pytest.importorskip("pyarrow.parquet")
    done = CliRunner().invoke(app, ["rollouts", str(folder), "--export", str(tmp_path / "out.parquet")])
    assert done.exit_code == 0, done.output
    columns = pq.read_table(tmp_path / "out.parquet").to_pydict()
    assert columns["reference"] == [[-1, -2, -3, -4, -5], [-6, -7, -8, -9, -10], None, None]
    assert columns["reward/other"] == [3.0, 4.0, None, None]
    make_model(folder)
    member = groups_of(folder)[0]["members"][1]
    assert member["reward/other"] == 4.0 and "reference" not in member
    assert member["by_token"]["reference"] == [None, -8.0, -9.0, -10.0]


def test_what_a_trajectory_was_shown_is_on_the_page_and_in_files_that_its_row_names(tmp_path: Path) -> None:
    red, green = (shown.picture(shown.COLOURS[name]) for name in "rg")
    tokens = np.array([5, *[9] * 20, 6, 7, *[9] * 20, 8, 9, 9], np.int32)
    mask = np.array([0] * 21 + [1, 1] + [0] * 21 + [1, 1], np.uint8)
    versions = np.where(mask == 1, 0, -1).astype(np.int32)
    one, two = (
        Trajectory(
            tokens, mask, np.zeros(len(mask), np.float32), versions, text="ab", finish="stop", turns=("a", "b"),
            rewards=np.zeros(len(mask), np.float32), pictures=pictures,
        )
        for pictures in ((red,), (red, green))
    )  # fmt: skip
    group = Group(0, Prompt(index=0, text=f"{PICTURE}what?", truth="a", pictures=(red,)), [one, two])
    taken = TakenGroup(number=0, experience=as_bytes(pack_group(group)), columns=rewards())
    folder = run(tmp_path, CONFIG, [taken])
    make_model(folder)
    first, second = rollouts(folder)
    assert first["response"] == "ab" and first["turns"] == ["a", "b"], "what is the policy's own is told apart"
    assert [len(row["pictures"]) for row in (first, second)] == [1, 2] and second["pictures"][0] == first["pictures"][0]
    assert [(folder / "pictures" / name).read_bytes() for name in second["pictures"]] == [red, green]
    (group,) = groups_of(folder)
    assert set(group["seen"]) == set(second["pictures"])
    assert all(each.startswith("data:image/jpeg;base64,") for each in group["seen"].values())
    member = group["members"][1]
    assert len(member["tokens"]) == len(member["mask"]) == len(member["lag"]) == len(member["logprob"]) == 7
    assert member["tokens"][3].endswith(" ×20 ") and member["mask"] == [0, 1, 1, 0, 0, 1, 1]
    assert group["asked"].endswith(" ×20 ") and "asked" not in member
    assert "seen" not in groups_of(folder, pictures=0)[0], "there is no room"
    (folder / "archive" / "step-000000.msgpack").unlink()
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (first, second)))
    assert groups_of(folder)[0]["seen"] == group["seen"], "from the files"


def test_a_column_of_two_kinds_is_not_exported_as_one(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    now = {"reference": np.array([1.0, 2.0], np.float32)}
    folder = run(tmp_path, CONFIG, [a_group(0, rewards() | reference())], [a_group(1, rewards() | now)])
    done = CliRunner().invoke(app, ["rollouts", str(folder), "--export", str(tmp_path / "out.parquet")])
    assert isinstance(done.exception, ConfigError) and "reference has a value for each token" in str(done.exception)


def test_a_group_that_cannot_be_read_costs_itself_alone(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    damaged = TakenGroup(number=1, experience=as_bytes(b"\xff" * 30), columns=rewards())
    folder = run(tmp_path, CONFIG, [a_group(0, rewards(), "答案"), damaged], [a_group(2, rewards())])
    done = CliRunner(charset="latin-1").invoke(app, ["rollouts", str(folder)])
    assert "答案".encode() in done.stdout_bytes, "in UTF-8, whatever the terminal has"
    assert [json.loads(line)["group"] for line in done.stdout.splitlines()] == [0, 0, 2, 2]
    assert f"warning: groups of {folder} that cannot be read, and are left out: 1" in done.stderr
    done = CliRunner().invoke(app, ["rollouts", str(folder), "--export", str(tmp_path / "out.parquet")])
    assert "4 trajectories" in done.stdout and "left out: 1" in done.stderr


def test_a_step_whose_file_is_cut_short_costs_itself_alone(tmp_path: Path) -> None:
    folder = run(tmp_path, CONFIG, *([a_group(number, rewards())] for number in range(3)))
    for step, size in ((1, 40), (2, 0)):
        file = tmp_path / "archive" / f"step-{step:06d}.msgpack"
        file.write_bytes(file.read_bytes()[:size])
    (tmp_path / "archive" / "judged-000000.msgpack").touch()
    done = CliRunner().invoke(app, ["rollouts", str(folder)])
    assert done.exit_code == 0 and len(done.stdout.splitlines()) == 2
    assert [f"step-00000{step}.msgpack cannot be read" in done.stderr for step in range(3)] == [False, True, True]
    pytest.importorskip("pyarrow.parquet")
    done = CliRunner().invoke(app, ["rollouts", str(folder), "--export", str(tmp_path / "out.parquet")])
    assert done.exit_code == 0 and done.stderr.count("it is left out") == 2, done.output
    assert [group["step"] for group in groups_of(folder)] == [0]
    make_model(folder)
    for command in ("rollouts", "replay"):
        refused = CliRunner().invoke(app, [command, str(folder), "--step", "1"])
        assert isinstance(refused.exception, ArchiveError) and "step-000001.msgpack" in str(refused.exception)


@pytest.mark.parametrize(
    "judged",
    [
        {"groups": [{"number": 0, "sizes": [5, 5], **dict.fromkeys(NAMES, 3)}]},
        {"groups": [{"number": 0, "sizes": ["a"], **dict.fromkeys(NAMES, np.zeros(10, np.float32))}]},
        {"groups": [{"number": [0], "sizes": [5, 5], **dict.fromkeys(NAMES, np.zeros(10, np.float32))}]},
        {"groups": [{"number": 0, "sizes": [4, 6], **dict.fromkeys(NAMES, np.zeros(10, np.float32))}]},
        {"groups": [{"number": 0, "sizes": [5, 5], **dict.fromkeys(NAMES, np.zeros((2, 5), np.float32))}]},
        {"groups": [7]},
        [7],
    ],
)
def test_what_the_trainer_made_of_a_step_costs_itself_alone_where_it_is_damaged(tmp_path: Path, judged: Any) -> None:
    folder = run(tmp_path, CONFIG, [a_group(0, rewards())])
    (tmp_path / "archive" / "judged-000000.msgpack").write_bytes(wire.pack(judged))
    make_model(folder)
    member = groups_of(folder)[0]["members"][1]
    assert member["tokens"] and "by_token" not in member
    pytest.importorskip("pyarrow")
    done = CliRunner().invoke(app, ["rollouts", str(folder), "--export", str(tmp_path / "out.parquet")])
    assert done.exit_code == 0, done.exception


def make_model(folder: Path) -> None:
    build(load(folder / "config.yaml").model, SortSource(SortData(), False), folder / "model", 0)  # type: ignore[arg-type]


def test_a_step_without_a_column_of_the_config_is_not_redone(tmp_path: Path) -> None:
    folder = run(tmp_path, WITH_REFERENCE, [a_group(0, rewards())])
    make_model(folder)
    with pytest.raises(ConfigError, match="step 0 was trained without reference, .* config.yaml in a copy"):
        list(redo(folder, load(folder / "config.yaml")))
    damaged = TakenGroup(number=1, experience=as_bytes(b"\xff" * 30), columns=rewards())
    run(tmp_path, CONFIG, [a_group(0, rewards()), damaged])
    assert [step.groups for step in redo(folder, load(folder / "config.yaml"))] == [1], "as in the run itself"


def test_what_the_archive_has_not_is_told(tmp_path: Path) -> None:
    run(tmp_path, CONFIG)
    done = CliRunner().invoke(app, ["replay", str(tmp_path), "--step", "3"])
    assert "has no archive; before the run, set replay.archive=all" in str(done.exception)
    config = CONFIG | {"replay": {"archive": "all"}, "trainer": {"steps": 4, "device": "cpu"}}
    run(tmp_path, config)
    soon = "steps come there with the next checkpoint .trainer.checkpoint.every=50."
    with pytest.raises(ConfigError, match=f"RUN: .* has no archived step yet: {soon}; samples.jsonl has some now"):
        penstock.Run(tmp_path).rollouts()
    run(tmp_path, config, [a_group(0, rewards())])
    with pytest.raises(ConfigError, match=f"--step: 3 is not in the archive; it has steps 0 to 0; later {soon}"):
        penstock.Run(tmp_path).rollouts(3)
    run(tmp_path, CONFIG, [a_group(0, rewards())])
    done = CliRunner().invoke(app, ["replay", str(tmp_path), "--step", "3"])
    assert "--step: 3 is not in the archive; it has steps 0 to 0" in str(done.exception)


def test_a_file_that_is_called_something_else_is_not_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["rollouts", str(tmp_path), "--export", str(tmp_path / "out.csv")])
    assert isinstance(done.exception, ConfigError) and "out.parquet" in str(done.exception)
    assert not (tmp_path / "out.csv").exists()
