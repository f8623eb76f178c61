"""What is written down for people, where it cannot be."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from penstock.services.broker.batches import is_sampled
from penstock.services.broker.recorder import Recorder
from penstock.services.broker.seen import FOLDER, name_of
from penstock.services.broker.trackers import Trackers


def test_some_steps_are_the_first_and_others_over_the_whole_run() -> None:
    assert [step for step in range(31) if is_sampled(step, 400)] == [0, 1, 2, 3, 4, 10, 20, 30]


def test_pictures_that_cannot_be_kept_cost_no_row_and_no_broker(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file in the folder's place")
    recorder = Recorder(tmp_path, Trackers([], tmp_path, "none", {}))
    try:
        recorder.samples(0, [{"step": 0, "pictures": [name_of(b"a picture")]}], [b"a picture"])
        assert not recorder.wants_samples(0)
    finally:
        recorder.close()
    assert json.loads((tmp_path / "samples.jsonl").read_text())["pictures"] == [name_of(b"a picture")]


def test_who_reads_the_rows_reads_every_script_and_each_row_is_a_line(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, Trackers([], tmp_path, "none", {}))
    row = {"step": 0, "response": "答案é\u2028\x85 \ud800\x9b\n", "reward": 0.5}
    recorder.samples(0, [row], [])
    recorder.close()
    written = (tmp_path / "samples.jsonl").read_bytes()
    assert "答案é".encode() in written and b"\x1b" not in written
    (line,) = written.decode().splitlines()
    assert json.loads(line) == row and not set("\x85\x9b\u2028").intersection(line)


def test_a_full_disk_costs_a_line_for_people_and_no_message() -> None:
    with Path("/dev/full").open("w", buffering=1) as full:
        Recorder._write(full, {"step": 1})
        with suppress(OSError):
            full.close()  # what it still holds is lost with it
