"""Every key of the config is described, and the page that describes them is the one that the models make."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import Field
from typer.testing import CliRunner

from penstock.pipeline import cli
from penstock.pipeline.config import key_reference, load, parse
from penstock.pipeline.config.key_reference import REQUIRED, Key, UndescribedError, checked, find, meanings, walk
from penstock.pipeline.config.reference_page import INTRODUCTION, page
from penstock.services.runtime.settings import Section

ROOT = Path(__file__).parents[2]
KEYS = list(walk())
IDS = [" ".join((key.path, *key.needs)) for key in KEYS]


def test_the_page_is_up_to_date() -> None:
    stands = (ROOT / "docs" / "configuration.md").read_text()
    assert stands == page(), "the config's models have changed; run: penstock config --markdown > docs/configuration.md"


def test_the_introductions_examples_work(tmp_path: Path) -> None:
    whole, more, part = re.findall(r"```yaml\n(.*?)```", INTRODUCTION, re.S)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "more.yaml").write_text(more.replace("..", str(ROOT)))
    assert load(tmp_path / "runs" / "more.yaml").trainer.steps == 1000
    assert parse(yaml.safe_load(whole)).gate.max_lag == 2
    parse(yaml.safe_load(whole) | yaml.safe_load(part))
    commands = re.findall(r"^penstock run (.*)$", INTRODUCTION, re.M)
    assert len(commands) == 2
    for command in commands:
        file, *overrides = shlex.split(command)
        load(ROOT / file, overrides)


@pytest.mark.parametrize("key", KEYS, ids=IDS)
def test_every_key_has_a_meaning_and_its_default_is_the_models(key: Key) -> None:
    assert key.type and key.meaning.endswith((".", "?")), f"{key.path}: a meaning is a sentence"
    if key.default == REQUIRED:
        assert key.field.is_required()
    else:
        wanted = key.field.get_default(call_default_factory=True)
        assert checked(key.field, yaml.safe_load(key.default)) == wanted


@pytest.mark.parametrize("key", [key for key in KEYS if key.example or not key.blocks], ids=lambda key: key.path)
def test_every_key_has_an_example_that_it_takes(key: Key) -> None:
    assert key.example, f"{key.path}: write an example into its docstring, as: e.g. ``value``"
    value = checked(key.field, yaml.safe_load(key.example))
    if not key.field.is_required():
        assert value != key.field.get_default(call_default_factory=True), "an example shows another value"


def test_all_keys_of_a_whole_config_are_found() -> None:
    whole = parse({"model": {"type": "tiny"}, "prompts": {"train": {"type": "sort"}, "eval": {"type": "sort"}}})

    def paths(data: Any, path: str) -> list[str]:
        if isinstance(data, dict) and data:
            return [found for name, value in data.items() for found in paths(value, f"{path}.{name}" if path else name)]
        if isinstance(data, list) and data and isinstance(data[0], dict):
            return [found for index, value in enumerate(data) for found in paths(value, f"{path}.{index}")]
        return [path]

    found = paths(whole.model_dump(mode="json"), "")
    assert len(found) > 100 and [path for path in found if not find(path)] == []


class Bare(Section):
    """A section with a key that says nothing."""

    said: int = 1
    """This one does."""
    unsaid: int = Field(1, ge=1)


class Heir(Bare):
    """Inherits a meaning."""

    unsaid: int = 2
    """Now it says something."""


class Odd(Section):
    """A section with a type that has no words."""

    odd: complex = 1j
    """A key."""


class Cat(Section):
    """A choice."""

    type: Literal["cat"] = "cat"
    lives: int = 9
    """How many."""


class Dog(Section):
    """Another."""

    type: Literal["dog"] = "dog"


class Zoo(Section):
    """A list of choices."""

    animals: list[Annotated[Cat | Dog, Field(discriminator="type")]] = [Cat()]
    """Who lives here, e.g. ``[{type: dog}]``."""


def test_a_key_without_a_meaning_or_without_words_is_an_error() -> None:
    with pytest.raises(UndescribedError, match=r"bare\.unsaid: write a docstring under Bare\.unsaid"):
        key_reference._block(Bare, "bare", "bare", (), None)
    with pytest.raises(UndescribedError, match=r"odd\.odd: .*no words for the type"):
        key_reference._block(Odd, "odd", "odd", (), None)
    assert meanings(Heir) == {"said": "This one does.", "unsaid": "Now it says something."}


def test_a_list_of_choices_is_described() -> None:
    (animals,) = key_reference._block(Zoo, "zoo", "zoo", (), None).keys
    assert animals.type == "list of sections whose `type` is `cat` or `dog`"
    assert [block.choice for block in animals.blocks] == ["cat", "dog"] and animals.default == "[{type: cat}]"
    (lives,) = animals.blocks[0].keys
    assert lives.path == "zoo.animals.lives" and lives.assignment == "zoo.animals.0.lives=18"
    assert lives.needs == ("zoo.animals.type=cat",)


def _said(*arguments: str) -> str:
    done = CliRunner().invoke(cli.app, ["config", *arguments])
    assert done.exit_code == 0, done.output
    return re.sub(r"\s+", " ", done.output)


def test_the_command_describes_a_key() -> None:
    said = _said("gate.max_lag")
    assert "type whole number, at least 0 default 1 meaning η: no token older" in said
    assert "example penstock run FILE gate.max_lag=2" in said


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("prompts.train.prompt_key", "with prompts.train.type=hub"),
        ("reward.functions.timeout_s", "penstock run FILE reward.functions.0.timeout_s="),
        ("reward.functions.0.timeout_s", "number, above 0"),
        ("rollout.engine.max_sequences", "with rollout.engine.type=vllm"),
        ("rollout.engine.max_sequences", "with rollout.engine.type=torch"),
        ("rollout.engine.type", "section whose type is torch, vllm, plugin or none"),
        ("rollout.engine.vllm.enforce_eager", "map of names to values"),
        ("trainer.algorithm.loss", "type: ppo_clip"),
        ("gate", "penstock run FILE gate.max_lag=2"),
    ],
)
def test_the_command_finds(key: str, words: str) -> None:
    assert words in _said(key)


def test_the_command_lists_the_sections_a_line_each() -> None:
    lines = CliRunner().invoke(cli.app, ["config"]).output.splitlines()
    for key in key_reference.reference():
        assert any(line.split()[:1] == [key.path] and line.strip().endswith(".") for line in lines), key.path


@pytest.mark.parametrize(
    ("key", "hint"),
    [("gate.maxlag", "gate.max_lag"), ("max_lag", "gate.max_lag"), ("trainer.lr", "trainer.optimizer.lr"), ("qqq", "")],
)
def test_a_wrong_key_ends_with_2_and_the_nearest(
    key: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock", "config", key])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and f"{key}: there is no such key" in said and hint in said


def test_the_command_prints_the_page_without_torch() -> None:
    code = "import sys; from penstock.pipeline.config.reference_page import page; page(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert CliRunner().invoke(cli.app, ["config", "--markdown"]).output == page()
