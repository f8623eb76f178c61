"""Finding what users write, and telling them where it went wrong."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from penstock.services.runtime.install import install
from penstock.services.runtime.plugins import PluginError, UserCodeError, load_plugin, user_code
from penstock.services.runtime.user_folders import VARIABLE, find_file, lacks_command, look_in

KEY = "reward.functions.0.function"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another folder than the one we are in; files below it are found, as beside a config."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    look_in(tmp_path / "there")
    return tmp_path / "there"


def test_modules_and_files_are_found_beside_the_config(elsewhere: Path) -> None:
    (elsewhere / "beside_it.py").write_text("def score(): return 3\n")
    (elsewhere / "rows.jsonl").write_text("{}")
    assert load_plugin("beside_it:score", KEY)() == 3
    assert find_file("rows.jsonl") == elsewhere / "rows.jsonl"
    assert os.environ[VARIABLE].count(str(elsewhere)) == 1
    look_in(elsewhere)
    assert os.environ[VARIABLE].count(str(elsewhere)) == 1


def test_a_folder_may_be_called_by_the_hour(elsewhere: Path) -> None:
    by_hour = elsewhere / "2026-11-26T10:30"
    by_hour.mkdir()
    (by_hour / "rows.jsonl").write_text("{}")
    look_in(by_hour)
    assert find_file("rows.jsonl") == by_hour / "rows.jsonl"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_colon", "is not of the form module:name"),
        ("helpful_modul:score", "looked in .*here, .*there, and among the installed packages; did you mean"),
        ("helpful_module:scor", "has no 'scor'; did you mean 'score'"),
        ("imports_it:score", r"No module named 'not_there_at_all'.*imports_it\.py, line 1\); is that installed"),
        ("imports_too:score", r"No module named 'imports_t'.*imports_too\.py, line 1\); is that installed"),
        ("wrong_syntax:score", "SyntaxError"),
        ("random:score", r"random\.py is hidden by another module that is called random .*give yours another name"),
        ("zmq:score", r"zmq\.py is hidden by another module"),
    ],
)
def test_what_cannot_be_loaded_says_where_it_was_looked_for(elsewhere: Path, name: str, said: str) -> None:
    (elsewhere / "helpful_module.py").write_text("def score(): return 3\n")
    (elsewhere / "imports_it.py").write_text("import not_there_at_all\n")
    (elsewhere / "imports_too.py").write_text("import imports_t\n")
    (elsewhere / "wrong_syntax.py").write_text("def score(:\n")
    for taken in ("random", "zmq"):
        (elsewhere / f"{taken}.py").write_text("def score(): return 3\n")
    with pytest.raises(PluginError, match=f"{KEY}: .*{said}"):
        load_plugin(name, KEY)


def test_an_error_names_the_users_own_line(elsewhere: Path) -> None:
    (elsewhere / "goes_wrong.py").write_text("import json\n\n\ndef score():\n    return json.loads('{')\n")
    score = load_plugin("goes_wrong:score", KEY)
    with pytest.raises(UserCodeError) as told, user_code(KEY, "goes_wrong:score"):
        score()
    assert str(told.value).startswith(f"{KEY}: goes_wrong:score raised JSONDecodeError: ")
    assert str(told.value).endswith(f"({elsewhere / 'goes_wrong.py'}, line 5)")


def test_the_command_that_installs_a_part_fits_a_clone() -> None:
    root = Path(__file__).parents[2]
    command = install("data")
    assert command.startswith((".venv/bin/pip install -e '", f"{Path(sys.executable).with_name('pip')} install -e '"))
    assert command.endswith("[data]'") and (command.split("'")[1] in (".[data]", f"{root}[data]"))


def test_what_is_no_command_is_told_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.sh").write_text("#!/bin/sh\n")
    assert lacks_command("mine.sh") == "'mine.sh' is a file, and no command: write ./mine.sh"
    assert lacks_command("./mine.sh").endswith("mine.sh is no program; make it one: chmod +x ./mine.sh")
    Path("mine.sh").chmod(0o755)
    assert not lacks_command("./mine.sh") and not lacks_command("sh")
