"""`penstock agents`: the sessions that agents have, as the gateways of a run tell them."""

from __future__ import annotations

import json
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.pipeline.config import ConfigError
from penstock.pipeline.tools.arguments import warn
from penstock.services.runtime.plain import plain

COLUMNS = ("session", "key", "turns", "tokens", "waiting", "silent_s", "error")
ANSWER_S = 10.0


def sessions(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Gateway to its live sessions; of those that do not answer a warning. Raises `ConfigError` where the run has none,
    or none answers."""
    files = sorted((run / "gateways").glob("*.json"))
    if not files:
        raise ConfigError(f"RUN: {run} has no gateways/*.json: it has gateway.count=0, or is not under way")
    key = run / "keys" / "agents.key"
    headers = {"Authorization": f"Bearer {key.read_text().strip()}"} if key.is_file() else {}
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a run's own gateways are behind no proxy
    found: dict[str, list[dict[str, Any]]] = {}
    silent: list[str] = []
    for file in files:
        url = "the address in its file"
        try:
            url = json.loads(file.read_text())["http"]
            with direct.open(urllib.request.Request(f"{url}/v1/sessions", headers=headers), timeout=ANSWER_S) as answer:
                rows = json.loads(answer.read())
            if not isinstance(rows, list) or not all(
                isinstance(row, dict) and set(COLUMNS) <= row.keys() for row in rows
            ):
                raise ValueError("what is there is no gateway")
            found[file.stem] = rows
        except (OSError, ValueError, HTTPException) as error:  # as where something else is at a killed one's address
            silent.append(f"{file.stem} does not answer at {url}: {plain(str(error))}")
    if silent and not found:
        raise ConfigError(f"RUN: {'; '.join(silent)}")
    for each in silent:
        warn(each)
    return found


def show(console: Console, run: Path) -> None:
    """Prints them as a table, those that have been silent longest first."""
    for gateway, rows in sessions(run).items():
        table = Table(title=f"{gateway}: {len(rows)} sessions")
        for column in COLUMNS:
            table.add_column(column.replace("silent_s", "silent, s"))
        for row in sorted(rows, key=lambda row: -row["silent_s"]):
            table.add_row(*(Text(plain(str(row[column]))) for column in COLUMNS))
        console.print(table)
