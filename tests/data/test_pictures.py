"""Rows whose prompts show pictures: whatever form these have, what is asked is the file as it was."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from penstock.pipeline.preflight.report import Report
from penstock.pipeline.preflight.unshown import look_at_rows
from penstock.protocols.experience import PICTURE, Prompt
from penstock.services.data import DataError, open_source, written
from penstock.services.data.config import CustomData, HubData, MixData
from penstock.services.data.picture_files import open_picture, size_of
from tests import shown

RED, GREEN = (shown.picture(shown.COLOURS[name]) for name in "rg")


def in_json(folder: Path, *rows: dict[str, Any], **config: Any) -> Any:
    (folder / "red.png").write_bytes(RED)
    (folder / "green.png").write_bytes(GREEN)
    (folder / "broken.png").write_bytes(b"not a picture")
    (folder / "more").mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_source(HubData(path="json", files=[str(folder / "rows.jsonl")], images_key="images", **config))


def content(prompt: Prompt) -> str:
    assert prompt.messages is not None
    return prompt.messages[-1]["content"]


def test_files_are_looked_for_beside_the_data(tmp_path: Path) -> None:
    both = {"prompt": f"is {PICTURE} or {PICTURE} red?", "images": ["red.png", "green.png"]}
    rows = in_json(tmp_path, {"prompt": "what is it?", "images": ["red.png"]}, both, {"prompt": "1+1=", "images": None})
    assert [content(row) for row in rows] == [f"{PICTURE}what is it?", both["prompt"], "1+1="]
    assert [row.pictures for row in rows] == [(RED,), (RED, GREEN), ()]
    assert rows[0].truth == {"prompt": "what is it?"}, "no reward is handed pictures with the row"
    plain = in_json(tmp_path, {"prompt": "what?", "images": [str(tmp_path / "red.png")]}, chat=False)
    assert plain[0].text == f"{PICTURE}what?" and plain[0].pictures == (RED,)


def test_files_may_be_told_in_other_ways(tmp_path: Path) -> None:
    text = base64.b64encode(RED).decode()
    told: list[Any] = [{"image": "red.png"}, {"image": "file://red.png"}, {"bytes": text, "path": "gone.png"}]
    told.append(f"data:image/png;base64,{text}")
    for number, each in enumerate(told):
        assert in_json(tmp_path, {"prompt": "what?", "images": each})[0].pictures == (RED,), number


def test_pictures_are_made_smaller_or_larger_in_their_own_proportions(tmp_path: Path) -> None:
    (tmp_path / "wide.png").write_bytes(wide := shown.picture(shown.COLOURS["r"], (400, 100)))
    row = {"prompt": "what?", "images": ["wide.png"]}
    (same,) = in_json(tmp_path, row, max_pixels=40_000, min_pixels=40_000)[0].pictures
    assert same == wide, "as it is"
    for how, size in (({"max_pixels": 10_001}, (200, 50)), ({"min_pixels": 160_000}, (800, 200))):
        (fitted,) = in_json(tmp_path, row, **how)[0].pictures
        assert size_of(fitted) == size
    (tmp_path / "cut.png").write_bytes(wide[:60])
    with pytest.raises(DataError, match="row 0: images: .* cannot be read to its end"):
        in_json(tmp_path, row | {"images": ["cut.png"]}, max_pixels=9)[0]
    with pytest.raises(ValueError, match="min_pixels=9 is above max_pixels=4; swap them"):
        in_json(tmp_path, row, max_pixels=4, min_pixels=9)


def test_chats_show_pictures_where_their_parts_say_or_before_the_users_first_words(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "is "}, {"type": "image"}, {"type": "text", "text": " red?"}]
    asked = {"prompt": [{"role": "user", "content": parts}], "images": ["red.png"]}
    assert content(in_json(tmp_path, asked)[0]) == f"is {PICTURE} red?"
    asked["prompt"] = [{"role": "system", "content": "Look."}, {"role": "user", "content": "what?"}]
    assert content(in_json(tmp_path, asked)[0]) == f"{PICTURE}what?"


@pytest.mark.parametrize("several", [False, True])
def test_images_of_a_data_set_stay_the_files_that_they_were(tmp_path: Path, several: bool) -> None:
    image = {"bytes": RED, "path": None}
    kind = datasets.List(datasets.Image()) if several else datasets.Image()
    rows = {"prompt": ["what?"], "truth": ["red"], "images": [[image] if several else image]}
    kinds = {"prompt": datasets.Value("string"), "truth": datasets.Value("string"), "images": kind}
    datasets.Dataset.from_dict(rows, features=datasets.Features(kinds)).to_parquet(tmp_path / "rows.parquet")
    files = [str(tmp_path / "rows.parquet")]
    source = open_source(HubData(path="parquet", files=files, images_key="images", truth_key="truth"))
    assert source[0].pictures == (RED,) and source[0].truth == "red"


@pytest.mark.parametrize(
    ("images", "says"),
    [
        (["blue.png"], r"row 0: images: picture 0: no such file: blue.png, also beside "),
        (["https://x.org/a.png"], "no picture is fetched: keep its file"),
        ([""], "row 0: images: picture 0 is empty; it must be an image of a data set or of Pillow, the bytes"),
        (["red.png", "broken.png"], r"row 0: images: picture 1 \(broken.png\): 13 bytes that are no picture"),
        (["more"], "row 0: images: picture 0: more is a folder; name a file in it"),
        ([], "row 0: its words have <image>, and 'images' has no picture"),
        ([7], "picture 0 is a number"),
        (["A" * 5000], "picture 0 is a text of 5000 characters, no path"),
        (["A" * 4000], "picture 0: .*File name too long"),
        (["A" * 240], "no such file: A{200}… \\(base64 goes into a map, as its bytes\\)"),
        ([{"bytes": "red.png"}], "picture 0 has bytes that are a text, and no base64: "),
        ([{"url": "red.png"}], "picture 0 is a map of url; it wants bytes, path or image"),
        (["red.png", "green.png"], "row 0: its words have 1 times <image>, and its pictures are 2"),
    ],
)
def test_a_picture_that_is_none_costs_its_row(tmp_path: Path, images: list[Any], says: str) -> None:
    bad = {"prompt": f"is {PICTURE} red?", "images": images}
    paths = all(isinstance(each, str) for each in images)
    rows = in_json(tmp_path, bad, {"prompt": "what?", "images": ["red.png"] if paths else [8]})
    with pytest.raises(DataError, match=says):
        rows[0]
    if paths:
        assert rows[1].pictures == (RED,)


def test_what_a_script_gives_is_written_down_and_read_again(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    rows = [
        {"prompt": "what?", "truth": "red", "images": [str(tmp_path / "red.png"), {"bytes": GREEN, "path": None}]},
        {"prompt": "1+1=", "truth": "2"},
        {"prompt": "and this?", "image": open_picture(GREEN).convert("CMYK")},
        Prompt(index=3, text=f"{PICTURE}?", pictures=(RED,)),
    ]
    lines = [written.line(row) for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    assert [written.shows(line) for line in lines] == [True, False, True, True]
    read = written.Written(str(tmp_path / "rows.jsonl"))
    assert content(read[0]) == f"{PICTURE}{PICTURE}what?" and read[0].pictures == (RED, GREEN)
    assert read[1].pictures == () and read[3] == rows[3]
    assert open_picture(read[2].pictures[0]).size == open_picture(GREEN).size
    old = written.line(Prompt(index=0, text="?")).replace('"pictures": []', '"source": ""')
    (tmp_path / "rows.jsonl").write_text(old)
    assert written.Written(str(tmp_path / "rows.jsonl"))[0].pictures == (), "of a run that older code began"
    with pytest.raises(ValueError, match="pictures"):
        Prompt(index=0, text=f"{PICTURE}?", pictures=["left.png"])  # type: ignore[arg-type]
    with pytest.raises(DataError, match="images: picture 0: no such file: nowhere.png"):
        written.line({"prompt": "what?", "images": ["nowhere.png"]})
    with pytest.raises(DataError, match="images: picture 0 is ndarray; it must be an image of a data set or of Pillow"):
        written.line({"prompt": "what?", "images": np.zeros((4, 4, 3), np.uint8)})
    (tmp_path / "rows.jsonl").write_text(written.line({"prompt": f"{PICTURE} what?"}))
    with pytest.raises(DataError, match="row 0: its words have <image>, and it has no images"):
        written.Written(str(tmp_path / "rows.jsonl"))[0]


def test_columns_of_pictures_that_nothing_names_are_known(tmp_path: Path) -> None:
    kinds = {"prompt": datasets.Value("string"), "one": datasets.Image(), "several": datasets.List(datasets.Image())}
    rows = {"prompt": ["what?"], "one": [None], "several": [[]]}
    datasets.Dataset.from_dict(rows, features=datasets.Features(kinds)).to_parquet(tmp_path / "rows.parquet")
    both = HubData(path="parquet", files=[str(tmp_path / "rows.parquet")], truth_key="prompt")
    parts = {"left": both, "right": both.model_copy(update={"images_key": "several"})}
    mixture = open_source(mixed := MixData(sources=parts))
    report = Report()
    look_at_rows(mixed, "prompts.train", mixture, mixture[:2], report)
    assert [note.split("; ")[0] for note in report.notes] == [
        "prompts.train.sources.left: nothing names the pictures of one, several",
        "prompts.train.sources.right: nothing names the pictures of one",
    ]
    assert report.notes[0].endswith("as prompts.train.sources.left.images_key")


def test_the_remedy_for_blind_rows_is_that_of_their_source(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": f"{PICTURE} what?", "truth": "1"}) + "\n")
    parts = {
        "file": HubData(path="json", files=[str(tmp_path / "rows.jsonl")], truth_key="truth"),
        "own": CustomData(function="tests.data.test_pictures:blind"),
    }
    mixture = open_source(mixed := MixData(sources=parts))
    report = Report()
    look_at_rows(mixed, "prompts.train", mixture, mixture[:2], report)
    assert [found.split(":")[0] for found in report.problems] == ["prompts.train.sources.file"]
    assert "name the column of their pictures as prompts.train.sources.file.images_key; where" in report.problems[0]
    assert "give them as penstock.Prompt(…, pictures=(bytes, …)), and set pictures: true" in report.notes[0]


@pytest.mark.parametrize(("seeing", "ends"), [(1, True), (2, False)])
def test_nothing_starts_where_most_rows_are_blind(seeing: int, ends: bool, tmp_path: Path) -> None:
    rows = [{"prompt": f"{PICTURE} what?"}] * 2 + [{"prompt": "what?"}] * seeing
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | {"truth": "1"}) + "\n" for row in rows))
    source = open_source(config := HubData(path="json", files=[str(tmp_path / "rows.jsonl")], truth_key="truth"))
    look_at_rows(config, "prompts.train", source, list(source), report := Report())
    assert [bool(report.problems), bool(report.notes)] == [ends, not ends]


def blind() -> list[Prompt]:
    """Rows of a user's own."""
    return [Prompt(index=0, text=f"{PICTURE} what?")]
