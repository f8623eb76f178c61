"""Functions of a script, written down for a run's processes."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import yaml
from datasets import Dataset

import penstock
from penstock.pipeline.api.functions import Functions
from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.config.load import as_overrides
from penstock.services.data import DataError, open_source
from penstock.services.data.config import CustomData
from penstock.services.data.written import line
from tests.e2e import rewards
from tests.environments import games

SCRIPT = '''
import math
import re
import sys
from collections import Counter
from typing import Any

from penstock.pipeline.api.functions import Functions

LETTERS = re.compile(r"[a-z]+", re.I)
WEIGHTS = {"right": 1.0, "near": (0.5, [None])}


class Base:
    best = WEIGHTS["right"]


class Judge(Base):
    def rate(self, text: str) -> float:
        return self.best * len(LETTERS.findall(text))


response = open(sys.argv[0])  # of this script alone: below it is a parameter's name
WIDE = 1.0


def near(response: str, truth: Any, scale: float = WIDE) -> bool:
    found = [letter for letter in response]
    return len(found) >= 0 and Counter(response) == Counter(truth) and math.isfinite(1.0)


def reward(response: str, truth: Any, again: bool = False) -> float:
    """The function that is given."""
    if again:
        return reward(response, truth)
    return Judge().rate(response) if response == truth else WEIGHTS["near"][0] * near(response, truth)


found = Functions("written")
assert found.name(reward, "reward") == "written:reward"
open(sys.argv[1], "w").write(found.source)
'''


def test_what_a_script_defines_is_written_with_all_that_it_uses(tmp_path: Path) -> None:
    script, written = tmp_path / "script.py", tmp_path / "written.py"
    script.write_text(SCRIPT)
    subprocess.run([sys.executable, str(script), str(written)], check=True)
    spec = importlib.util.spec_from_file_location("written", written)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.reward("ab", "ab") == 1.0 and module.reward("ba", "ab", again=True) == 0.5
    assert module.reward("xy", "ab") == 0.0
    assert "Functions" not in written.read_text(), "what it does not use is left out"


def test_what_a_module_has_is_named() -> None:
    found = Functions("written")
    assert found.name(rewards.plenty, "reward") == "tests.e2e.rewards:plenty"
    assert found.source == "" and found.folders == [Path(__file__).parents[2]]


USES_MODULES = """
import sys
import helpers
import numpy as np
from helpers.inner import strip
from penstock.pipeline.api.functions import Functions


def reward(response: str, truth: str) -> float:
    return float(np.float32(helpers.norm(strip(response)) == truth))


found = Functions("written")
found.name(reward, "reward")
print([str(folder) for folder in found.folders])
"""


HIDING = """
import functools
import sys
import xml.dom.minidom
from numpy import sum
from penstock.pipeline.api.functions import Functions

NONE, LEAST = float("nan"), -float("inf")
there = __file__


def max(values):
    return 0.25


def halved(function):
    @functools.wraps(function)
    def wrapper(response, truth):
        return function(response, truth) / 2
    return wrapper


@halved
def length(response, truth):
    return len(xml.dom.minidom.parseString(response).childNodes)


def reward(response, truth):
    assert NONE != NONE and LEAST < -1e300 and there
    return length(response, truth) + float(sum([[1, 2], [3]][1])) + max([9]) + min([4, 5])


same = reward
found = Functions("written")
print(reward("<a/>", ""), found.name(same, "reward"))
open(sys.argv[1], "w").write(found.source)
"""


def test_a_reward_is_the_same_in_the_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(HIDING)
    written = tmp_path / "written.py"
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(written)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["7.75", "written:reward"]
    again = [sys.executable, "-c", "import written; print(written.reward('<a/>', ''))"]
    done = subprocess.run(again, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "7.75"


REFUSED = """
import functools
from helpers import Judge, better, halved
from penstock.pipeline.api.functions import Functions


def base(response, truth):
    return 1.0


def make(weight):
    def score(response):
        return weight * len(response)
    return score


norm = lambda text: text.strip()
scorer = make(0.5)
strict = halved(base)


def uses_norm(response, truth):
    return norm(response) == truth


def uses_scorer(response, truth):
    return scorer(response)


def uses_strict(response, truth):
    return strict(response, truth)


for value in (strict, uses_strict, norm, uses_norm, scorer, uses_scorer, Judge.rate, Judge().rate, better):
    try:
        print(Functions("written").name(value, "reward"))
    except Exception as error:
        print(error)
"""
HELPERS = """
import functools


def halved(function):
    @functools.wraps(function)
    def wrapper(response, truth):
        return function(response, truth) / 2
    return wrapper


class Judge:
    def rate(self, response, truth):
        return 1.0


def worse(response, truth):
    return 1.0


better = halved(worse)
"""


def test_a_function_that_another_would_stand_for_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(REFUSED)
    (tmp_path / "helpers.py").write_text(HELPERS)
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert all(line.startswith("reward: strict wraps base, and how cannot be written down") for line in said[:2])
    assert all(line.startswith("reward: norm is a lambda, a method, or a function inside a") for line in said[2:4])
    assert said[4].startswith("reward: make.<locals>.score has no name that another process could find it by")
    assert said[5].startswith("reward: scorer is a lambda, a method, or a function inside a function")
    assert all(line.startswith("reward: Judge.rate has no name that another process") for line in said[6:8])
    assert said[8:] == ["helpers:better"], "what a module has is found by the name that it has there"


def test_modules_beside_the_script_are_found_by_the_runs_processes(tmp_path: Path) -> None:
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "__init__.py").write_text("def norm(text): return text.lower()\n")
    (tmp_path / "helpers" / "inner.py").write_text("def strip(text): return text.strip()\n")
    (tmp_path / "script.py").write_text(USES_MODULES)
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([str(tmp_path)]), "and neither numpy's folder nor the library's"


def test_two_functions_of_one_name_are_told_apart(tmp_path: Path) -> None:
    script = SCRIPT + "\nfirst = reward\ndef reward(response, truth): return 2.0\nfound.name(reward, 'loss')\n"
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "written.py")], capture_output=True, text=True
    )
    assert "loss: two different things are called reward; give one of them another name" in done.stderr


def test_overrides_say_what_was_given() -> None:
    given = {"run.project": "math 😀, naïve: #x\x85\x7f", "trainer.optimizer.lr": 1e-6, "run.trackers": []}
    config = load(Path("configs/quickstart.yaml"), as_overrides(given))
    assert config.run.project == given["run.project"] and config.trainer.optimizer.lr == 1e-6
    config.run.project.encode()


def test_values_of_numpy_and_paths_are_as_good_as_others(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.pipeline.api.trainer.load", lambda *_: None)  # some of it no config has
    monkeypatch.setattr("penstock.pipeline.api.trainer.launched", lambda *args: args)
    given = {"trainer.steps": np.int64(5), "trainer.optimizer": {"lr": np.float32(0.5)}, "model.path": Path("models/a")}
    trainer = penstock.Trainer(
        {"gate": {"max_lag": np.int64(2)}, "run": {"deterministic": np.bool_(True), "folder": tmp_path}},
        name="one", overrides=given, reward={"function": "length", "weight": np.float64(0.5)},
        advantage={"type": np.str_("rloo")},
        prompts={"type": "hub", "files": (Path("a.json"),), "since": date(2026, 1, 2)},
    )  # fmt: skip
    command, _ = trainer.start()  # type: ignore[misc]
    assert command[-3:] == ["trainer.steps=5", 'trainer.optimizer={"lr": 0.5}', 'model.path="models/a"']
    data = yaml.safe_load((tmp_path / "one.script" / "config.yaml").read_text())
    assert data == {
        "gate": {"max_lag": 2},
        "run": {"deterministic": True, "folder": str(tmp_path), "name": "one"},
        "reward": {"functions": [{"function": "length", "weight": 0.5}]},
        "trainer": {"algorithm": {"advantage": {"type": "rloo"}}},
        "prompts": {"train": {"type": "hub", "files": ["a.json"], "since": "2026-01-02"}},
    }


def test_what_no_process_could_find_is_refused() -> None:
    def local(response: str) -> float:
        return 1.0

    for value, words in (
        (lambda response: 1.0, "reward: .*<lambda> has no name that another process could find it by"),
        (local, "reward: .*local has no name"),
        (3, "reward: give a function or a class, not 3"),
    ):
        with pytest.raises(ConfigError, match=words):
            Functions("written").name(value, "reward")  # type: ignore[arg-type]


def test_of_a_function_without_source_one_error_is_told(tmp_path: Path) -> None:
    lines = ["from penstock.pipeline.api.functions import Functions", "exec('def typed(response): return 1.0')"]
    (tmp_path / "script.py").write_text("\n".join([*lines, "Functions('written').name(typed, 'reward')"]))
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True)
    assert "reward: the source of typed is not known" in done.stderr and "direct cause" not in done.stderr


def test_a_value_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    script = SCRIPT.replace("WEIGHTS = {", "lock = open(sys.argv[0])\nWEIGHTS = {").replace(
        "    if again:", "    lock.read()\n    if again:"
    )
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, str(tmp_path / "script.py"), "x"], capture_output=True, text=True)
    assert "reward: it uses lock, a TextIOWrapper of this script, which cannot be written down" in done.stderr


def test_rows_and_functions_take_the_place_of_what_the_config_says(tmp_path: Path, monkeypatch: Any) -> None:
    rows: list[Any] = [penstock.Prompt(index=0, text="1+1=", truth="2"), {"prompt": "2+3=", "truth": 5}]
    trainer = penstock.Trainer(
        {"model": {"type": "tiny"}, "trainer": None}, name="one", folder=tmp_path, prompts=rows,
        environment={"games": games.Counting},
        reward=[rewards.plenty, "exact_match", {"function": "length", "weight": 0}], loss="gspo",
        advantage={"type": "rloo"}, correction=rewards.plenty,
    )  # fmt: skip
    monkeypatch.setattr("penstock.pipeline.api.trainer.launched", lambda *args: args)
    command, folder = trainer.start()  # type: ignore[misc]
    data = yaml.safe_load((tmp_path / "one.script" / "config.yaml").read_text())
    assert folder == tmp_path / "one" and str(tmp_path / "one.script" / "config.yaml") in command
    assert data["rollout"]["environments"] == {"games": {"environment": "tests.environments.games:Counting"}}
    assert data["reward"]["functions"] == [
        {"function": "tests.e2e.rewards:plenty", "name": "plenty"},
        {"function": "exact_match"},
        {"function": "length", "weight": 0},
    ]
    assert data["trainer"]["algorithm"] == {
        "loss": {"type": "gspo"},
        "advantage": {"type": "rloo"},
        "correction": {"type": "custom", "function": "tests.e2e.rewards:plenty"},
    }
    assert (tmp_path / "one.script" / "prompts.jsonl").read_text().splitlines()[1] == '{"prompt": "2+3=", "truth": 5}'
    assert data["prompts"]["train"]["options"] == {"file": str(tmp_path / "one.script" / "prompts.jsonl")}


def test_rows_are_read_as_they_were_given(tmp_path: Path, monkeypatch: Any) -> None:
    chat = [{"role": "user", "content": "1+3="}]
    rows: list[Any] = [
        penstock.Prompt(index=7, text="1+1=", truth="2024-01-02", source="sums"),
        penstock.Prompt(index=8, messages=chat),
        {"prompt": "1+3=", "truth": "2024-01-03"},
        {"prompt": chat, "truth": {"a": [1, None]}},
        {"prompt": "judged alone"},
        {"prompt": ""},
    ]
    held_out = [{"prompt": "2+2=", "answer": "4"}]
    start = {"model": {"type": "tiny"}}
    trainer = penstock.Trainer(start, name="one", folder=tmp_path, prompts=rows, eval_given=held_out)
    monkeypatch.setattr("penstock.pipeline.api.trainer.launched", lambda *args: args)
    trainer.start()
    data = yaml.safe_load((tmp_path / "one.script" / "config.yaml").read_text())
    source = open_source(CustomData.model_validate(data["prompts"]["train"]))
    assert list(source[:5]) == [
        *rows[:2],
        penstock.Prompt(index=2, messages=chat, truth="2024-01-03"),
        penstock.Prompt(index=3, messages=chat, truth={"a": [1, None]}),
        penstock.Prompt(index=4, messages=[{"role": "user", "content": "judged alone"}]),
    ]
    (given,) = open_source(CustomData.model_validate(data["prompts"]["eval_given"]["given"]))
    assert given.answer == "4"
    with pytest.raises(DataError, match="^row 5: the prompt is empty"):
        source[5]


def test_a_key_that_no_config_has_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    told = {"overrides": {"trainer.optimiser.lr": 1.0}, "prompts": [{"prompt": "1+1=", "truth": "2"}]}
    trainer = penstock.Trainer({"model": {"type": "tiny"}}, name="one", folder=tmp_path, **told)
    with pytest.raises(ConfigError, match="trainer.optimiser: unknown key; did you mean 'optimizer'"):
        trainer.start()
    assert not list(tmp_path.iterdir())


def test_a_table_of_pandas_is_rows_and_its_numbers_are_json() -> None:
    table = pandas.DataFrame({"prompt": ["1+1=", "2+2=", "?"], "truth": [2.0, 4.0, math.nan], "more": [1, 2, 3]})
    read = [json.loads(line(row)) for row in table.to_dict("records")]
    assert [row["truth"] for row in read] == [2.0, 4.0, None]
    assert json.loads(line({"prompt": "1+1=", "truth": np.int64(2)}))["truth"] == 2
    trainer = penstock.Trainer({"model": {"type": "tiny"}}, prompts=table)
    assert [json.loads(row)["prompt"] for row in trainer._rows["prompts.jsonl"]] == list(table["prompt"])


def test_what_a_table_adds_to_tools_is_left_out() -> None:
    """Each map of it has every key that any has."""
    tools = [{"name": name, "parameters": {name: {"type": "string"}}} for name in ("look", "go")]
    table = Dataset.from_list([{"prompt": "where?", "truth": {"a": None}, "tools": tools}])
    assert table[0]["tools"] != tools
    (row,) = penstock.Trainer({"model": {"type": "tiny"}}, prompts=table)._rows["prompts.jsonl"]
    assert json.loads(row)["tools"] == tools and json.loads(row)["truth"] == {"a": None}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"config": "nowhere.yaml"}, "cannot read nowhere.yaml"),
        (
            {"config": {}, "overrides": {"run.name": "b"}},
            "overrides: run.name: give a run's name and folder as name= and",
        ),
        (
            {"config": {}, "overrides": {"run": {"folder": "b"}}},
            "overrides: run: give a run's name and folder as name=",
        ),
        ({"config": {}, "prompts": [{"question": "1+1="}]}, "prompts: row 0 has no prompt; it has question"),
        ({"config": {}, "prompts": [{"prompt": "1", "truth": {1}}]}, "prompts: row 0: .*a truth is JSON"),
        (
            {"config": {}, "prompts": [{"prompt": "1+1=", "solution": "2"}]},
            "row 0: it has no truth, and solution",
        ),
        (
            {"config": {}, "prompts": [{"prompt": "1+1=", "answer": "2", "level": 3}]},
            "row 0: it has no truth, and level would be read by nobody",
        ),
        ({"config": {}, "prompts": [("1+1=", "2")]}, "prompts: row 0 is no map with a prompt, but"),
        ({"config": 5}, "config: give a YAML file, or the same as a map, not 5"),
        ({"config": {"run": "x"}}, "run: a section is a map of keys, not 'x'"),
        ({"config": {"run": {"name": 5}}}, "run.name: give text, not 5"),
        ({"config": {"trainer": ["x"]}, "loss": "gspo"}, "trainer: a section is a map of keys, not .'x'."),
        ({"config": {"gate": {"max_lag": print}}}, "gate.max_lag: no config has a builtin_function_or_method"),
        ({"config": {}, "name": 5}, "name: give text, not 5"),
        ({"config": {}, "folder": 5}, "folder: give text, not 5"),
        ({"config": {}, "reward": 5}, "reward: give a function or a class, not 5"),
        ({"config": {}, "reward": {"function": "length", "weight": 1j}}, "reward.weight: no config has a complex 1j"),
        ({"config": {}, "loss": {"type": "gspo", "clip_low": b"x"}}, "loss.clip_low: no config has a bytes b'x'"),
        ({"config": {}, "prompts": 5}, "prompts: give rows, or a function that returns them, not 5"),
        ({"config": {}, "evaluation": "sums"}, "evaluation: give rows, or a function that returns them, not 'sums'"),
        ({"config": {}, "overrides": ["a=1"]}, "overrides: give a map, not .'a=1'."),
        ({"config": {}, "overrides": {"reward.functions": [{"function": len}]}}, "reward.functions.0.function: no con"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        penstock.Trainer(**given)
