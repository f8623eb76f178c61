"""A user's own command for every checkpoint: told of each once, tried again, given up, cut off."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.services.learning import handed_on
from penstock.services.learning.handed_on import DONE, HandedOn
from penstock.services.runtime.checkpoint_folders import path_of


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., HandedOn]:
    monkeypatch.setattr(handed_on, "RETRY_S", 0.0)
    for version in (2, 4):
        path_of(tmp_path, version).mkdir()

    def make(script: str, within_s: float = 30.0) -> HandedOn:
        words = ["bash", "-c", script.replace("OUT", str(tmp_path / "out"))]
        return HandedOn(words, within_s, tmp_path, tmp_path / "said")

    return make


def wait(each: HandedOn, enough: Callable[[], bool] = lambda: False) -> None:
    deadline = time.monotonic() + 30
    while each.poll() and not enough():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_checkpoint_is_handed_on_once_and_one_that_failed_again(
    make: Callable[..., HandedOn], tmp_path: Path
) -> None:
    # For step 4 it fails the first time.
    script = "echo {step} >> OUT; test -d {folder} || exit 9; test {step} != 4 || test $(grep -c 4 OUT) = 2"
    each = make(script)
    each.add(2)
    wait(each)
    assert (tmp_path / "out").read_text().split() == ["2", "4", "4"] and each.failed == ""
    again = make(script)
    again.add(4)
    assert not again.poll(), "whoever starts again finds that they are"
    path_of(tmp_path, 6).mkdir()
    again.add(6)
    assert again.held == {6}
    wait(again)
    assert (tmp_path / "out").read_text().split()[3:] == ["6"] and not again.held


def test_one_that_fails_is_given_up_and_told_with_its_last_words(make: Callable[..., HandedOn], tmp_path: Path) -> None:
    each = make("echo no such bucket >&2; test {step} != 2")
    wait(each)
    assert each.failed == "1 of the checkpoints, the last time: step 2: exit code 1, its last words: no such bucket"
    assert [(path_of(tmp_path, version) / DONE).exists() for version in (2, 4)] == [False, True]
    slow = make("sleep 60", within_s=0.1)
    wait(slow)
    assert "step 2: it was not done within 0.1 s (checkpoint.then_s)" in slow.failed


def test_a_command_that_moves_the_checkpoint_is_done_with_it_and_with_no_other(
    make: Callable[..., HandedOn], tmp_path: Path
) -> None:
    each = make("echo {step} >> OUT; rm -r {folder}; sleep 0.2")
    wait(each)
    assert (tmp_path / "out").read_text().split() == ["2", "4"] and each.failed == "" and not each.held


def test_one_whose_checkpoint_is_gone_is_passed_over_and_what_runs_ends_with_the_learner(
    make: Callable[..., HandedOn], tmp_path: Path
) -> None:
    each = make("echo $$ > OUT; sleep 60")
    wait(each, (tmp_path / "out").exists)
    path_of(tmp_path, 4).rmdir()
    each.close()
    number = int((tmp_path / "out").read_text())
    assert not Path(f"/proc/{number}").exists()
    each = make("echo {step} > OUT")
    wait(each)
    assert (tmp_path / "out").read_text() == "2\n"
