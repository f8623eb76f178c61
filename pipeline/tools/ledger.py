"""`penstock ledger`: which groups each step of a run trained on."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.pipeline.config import ConfigError
from penstock.services.runtime.lines import read_lines


def show_ledger(console: Console, folder: Path, as_json: bool) -> None:
    """Prints which groups each step trained on."""
    rows = {row["step"]: row for row in read_lines(folder / "ledger.jsonl")}
    if not rows:
        raise ConfigError(f"{folder}: no step is committed yet, or this is not a run's folder")
    if as_json:
        for step in sorted(rows):
            console.out(json.dumps(rows[step]))
        return
    table = Table("step", "version", "digest", "groups", box=None)
    for step in sorted(rows):
        row = rows[step]
        table.add_row(str(step), str(step + 1), row["digest"], _ranges(row["groups"]))
    console.print(table)


def _ranges(numbers: list[int]) -> str:
    """``3-9, 11`` for 3, 4, … 9, 11."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
