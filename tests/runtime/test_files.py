"""Files that are whole, and lines that are."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.protocols import keys
from penstock.services.runtime import files


def test_a_line_that_was_cut_short_does_not_cost_the_next(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for text in ('{"step": 0}\n', '{"step": 0}\n{"st', ""):
        path.write_text(text)
        with files.open_lines(path) as file:
            file.write('{"step": 1}\n')
        assert path.read_text().splitlines()[-1] == '{"step": 1}'
        assert path.read_text() == text + "\n" * text.endswith("t") + '{"step": 1}\n'


def test_what_could_not_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_whole(tmp_path / "step", b"data", durable=True)
    assert not list(tmp_path.iterdir())


def test_keys_that_were_half_made_are_made_anew(tmp_path: Path) -> None:
    keys.make(tmp_path)
    (tmp_path / "client.json").unlink()
    keys.make(tmp_path)
    broker, client = keys.load_broker(tmp_path / "broker.json"), keys.load_client(tmp_path / "client.json")
    assert (broker.broker_public, broker.client_public) == (client.broker_public, client.client_public)
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"broker.json", "client.json"}


def test_of_numbered_files_the_last_ones_stay_however_many_there_were(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"step-{number:06d}.msgpack").touch()
    (tmp_path / "judged-000000.msgpack").touch()
    files.remove_numbered(tmp_path, "step-", -3)
    assert len(list(tmp_path.iterdir())) == 13
    files.remove_numbered(tmp_path, "step-", 9)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step-000010.msgpack", "step-000011.msgpack", "judged-000000.msgpack"}
