"""`penstock agents`: the sessions that agents have, as the gateways of a run tell them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.pipeline.config import ConfigError

COLUMNS = ("session", "key", "turns", "tokens", "waiting", "silent_s", "error")
ANSWER_S = 10.0


def sessions(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Gateway to its live sessions. Raises `ConfigError` where the run has none, or one does not answer."""
    files = sorted((run / "gateways").glob("*.json"))
    if not files:
        raise ConfigError(f"RUN: {run} has no gateways/*.json: it has gateway.count=0, or is not under way")
    key = run / "keys" / "agents.key"
    headers = {"Authorization": f"Bearer {key.read_text().strip()}"} if key.is_file() else {}
    found = {}
    for file in files:
        url = json.loads(file.read_text())["http"]
        try:
            asked = urllib.request.Request(f"{url}/v1/sessions", headers=headers)
            with urllib.request.urlopen(asked, timeout=ANSWER_S) as answer:
                found[file.stem] = json.loads(answer.read())
        except (urllib.error.URLError, OSError) as error:
            raise ConfigError(f"RUN: {file.stem} does not answer at {url}: {error}") from None
    return found


def show(console: Console, run: Path) -> None:
    """Prints them as a table, those that have been silent longest first."""
    for gateway, rows in sessions(run).items():
        table = Table(title=f"{gateway}: {len(rows)} sessions")
        for column in COLUMNS:
            table.add_column(column.replace("silent_s", "silent, s"))
        for row in sorted(rows, key=lambda row: -row["silent_s"]):
            table.add_row(*(Text(str(row[column])) for column in COLUMNS))
        console.print(table)
