"""Commands that the docs name: they are there, with these options, and configs have the keys that are overridden."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock.pipeline.cli import app
from penstock.pipeline.config import ConfigError, load
from tests.pipeline.test_docs import PAGES, ROOT

PLACEHOLDER = re.compile(r"^[A-Z_]+$|…")
"""What a reader puts something of their own for."""
OWN_FILES = {"task.yaml", "config.yaml"}
"""Configs that a page has its readers write."""


def commands(page: Path) -> list[str]:
    """Those of code blocks, and code in the text that begins so."""
    text = re.sub(r"^```.*?^```$", "", page.read_text().replace("\\\n", " "), flags=re.M | re.S)
    return [*in_blocks(page), *re.findall(r"`((?:penstock|make) [^`\n]*)`", text)]


def in_blocks(page: Path) -> list[str]:
    """Lines of code blocks that begin with a command of ours, or of make's or Python's."""
    blocks = _blocks(page.read_text().replace("\\\n", " "))
    return re.findall(r"^ *((?:penstock|make|python) .*)$", blocks, re.MULTILINE)


def _blocks(text: str) -> str:
    every = re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    fenced = [block for language, block in every if language in ("", "sh", "bash", "console")]
    indented = re.findall(r"(?:^ {4}.*\n)+", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S), re.MULTILINE)
    return "\n".join([*fenced, *indented])


def words_of(command: str) -> list[str]:
    """Of the command itself, without what a shell does with it, and what may be left out."""
    command = re.sub(r"\[(?=--)|(?<=[\w.])\](?= |$)", "", re.sub(r"\s#.*$", "", command).replace("\\|", "|"))
    found = shlex.split(command.replace("$CLONE/", ""))
    ends = [i for i, word in enumerate(found) if word in ("|", ">", "&", "&&", ";", ">>")]
    return found[: ends[0]] if ends else found


def parsed(words: list[str]) -> dict[str, Any]:
    """Its parameters; none of a command that has others below it. Raises click's errors."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("penstock", [], resilient_parsing=True)
    rest = words[1:]
    while hasattr(command, "get_command") and rest and not rest[0].startswith("-"):
        inner = command.get_command(context, rest[0])
        if inner is None:
            raise ValueError(f"there is no command {rest[0]!r}")
        command, rest = inner, rest[1:]
        context = command.make_context(command.name, [], parent=context, resilient_parsing=True)
    if hasattr(command, "get_command"):
        return {}
    params: dict[str, Any] = command.make_context(command.name, rest, parent=context).params
    return params


TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def fault(command: str) -> str:
    """What is wrong with it; empty where nothing is."""
    words = words_of(command)
    if words[0] == "make":
        return ", ".join({w for w in words[1:] if "=" not in w and not w.startswith("-")} - TARGETS)
    if words[0] == "python":
        own = words[1] == "-m" or "/" not in words[1] or (ROOT / words[1]).is_file()
        return "" if own else f"there is no {words[1]}"
    try:
        params = parsed(words)
    except Exception as error:  # typer's own click
        alone = type(error).__name__ == "MissingParameter" and len(words) < 4
        return "" if alone or "…" in words else str(error)
    overrides = list(params.get("overrides") or [])
    for path in (params.get("config"), params.get("file")):
        if path is None or params.get("resume") or PLACEHOLDER.search(str(path)) or Path(path).name in OWN_FILES:
            continue
        if not (ROOT / path).is_file():
            return f"there is no {path}"
        if not any(PLACEHOLDER.search(word.partition("=")[2]) for word in overrides):
            try:
                load(ROOT / path, overrides)
            except ConfigError as error:
                return str(error)
    return ""


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "commands.md"], ids=lambda page: page.name)
def test_what_the_docs_name_is_there(page: Path) -> None:
    faults = {command: fault(command) for command in commands(page)}
    assert not {command: found for command, found in faults.items() if found}


def test_there_are_many_and_what_is_wrong_is_found() -> None:
    every = [command for page in PAGES for command in commands(page) if page.name != "commands.md"]
    assert len(every) > 200 and sum(command.startswith("penstock run configs") for command in every) > 10
    assert "No such option" in fault("penstock run configs/quickstart.yaml --no-such-thing")
    assert "there is no command" in fault("penstock bench nothing")
    assert "trainer.stepz" in fault("penstock run configs/quickstart.yaml trainer.stepz=3")
    assert fault("make no-such-target") and fault("penstock run configs/none.yaml")
