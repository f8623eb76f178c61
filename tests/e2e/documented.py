"""docs/metrics.md beside what a run has really written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.e2e.runs import ROOT

NAME = re.compile(r"`([^`]+)`")


def documented() -> dict[str, set[str]]:
    """Names in the first cells of each chapter's tables, by the chapter's first word; those of further names in the
    text of a cell too."""
    found: dict[str, set[str]] = {}
    chapter = ""
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if line.startswith("## "):
            chapter = line.removeprefix("## ").partition(":")[2].strip() or line.removeprefix("## ")
        elif line.startswith("| `"):
            found.setdefault(chapter, set()).update(NAME.findall(line.split("|")[1]))
            found[chapter].update(name for name in NAME.findall(line.split("|")[-2]) if "/" in name)
    return found


def undocumented(folder: Path) -> dict[str, set[str]]:
    """Names of metrics in the files of a run's ``folder`` that the page does not have, by file."""
    told = documented()
    steps, evals = told["a line for each step"], told["a line for each evaluation"]
    missing = {"metrics.jsonl": set[str](), "actors.jsonl": set[str]()}
    for row in _rows(folder / "metrics.jsonl"):
        missing["metrics.jsonl"] |= _unknown(row, steps if row["kind"] == "step" else steps | evals)
    for row in _rows(folder / "actors.jsonl"):
        for actor in row["actors"].values():
            missing["actors.jsonl"] |= _unknown(actor, told["a line each second"])
    for file, chapter, more in (
        ("weights.jsonl", "a line for each version that a rollout has loaded", {"time"}),
        ("samples.jsonl", "a line for each trajectory that is kept", set[str]()),
        ("ledger.jsonl", "", {"step", "groups", "seed", "max_lag", "digest"}),
    ):
        for row in _rows(folder / file):
            missing.setdefault(file, set()).update(_unknown(row, told.get(chapter, set()) | more))
    missing["summary.json"] = _unknown(json.loads((folder / "summary.json").read_text()), told["The other files"])
    return {file: names for file, names in missing.items() if names}


def _unknown(row: dict[str, Any], names: set[str]) -> set[str]:
    """Keys of ``row`` that are no name, nor of the form of one: ``latency/COLUMN`` is all that begins so."""
    prefixes = tuple(name[: re.search("[A-Z]", name).start()] for name in names if re.search("[A-Z]", name))  # type: ignore[union-attr]
    return {key for key in row if key not in names and not key.startswith(prefixes or ("\0",))}


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
