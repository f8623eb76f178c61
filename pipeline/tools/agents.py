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

COLUMNS = ("session", "key", "by", "turns", "tokens", "waiting", "silent_s", "given_on_s", "error")
SHOWN = {"waiting": "turns waiting", "silent_s": "silent, s", "given_on_s": "given on in, s"}
ANSWER_S = 10.0


def sessions(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Gateway to its live sessions; of those that do not answer a warning. Raises `ConfigError` where the run has none,
    or none answers."""
    files = sorted((run / "gateways").glob("*.json"))
    if not files:
        raise ConfigError(f"RUN: {run} has no gateways/*.json: it has gateway.count=0, or is not under way")
    found: dict[str, list[dict[str, Any]]] = {}
    silent: list[str] = []
    for file in files:
        url = "the address in its file"
        try:
            url = _url(file)
            rows = _asked(run, f"{url}/v1/sessions")
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


def abandon(run: Path, session: str) -> None:
    """Has another agent get the session, from the start. Raises `ConfigError` where no gateway has it, or says no."""
    at = next((name for name, rows in sessions(run).items() if any(row["session"] == session for row in rows)), None)
    if at is None:
        raise ConfigError(f"--abandon: no agent has a session {session!r}; penstock agents {run} lists those that are")
    try:
        url = f"{_url(run / 'gateways' / f'{at}.json')}/v1/sessions/{session}/abandon"
        _asked(run, url, {"reason": "given on by penstock agents --abandon"})
    except (OSError, ValueError, HTTPException) as error:
        raise ConfigError(f"--abandon: {at} has not given it on: {plain(str(error))}; ask again") from None


def _url(file: Path) -> str:
    return str(json.loads(file.read_text())["http"])


def _asked(run: Path, url: str, body: dict[str, Any] | None = None) -> Any:
    """What a gateway of the run answers to its owner."""
    key = run / "keys" / "agents.key"
    headers = {"Authorization": f"Bearer {key.read_text().strip()}"} if key.is_file() else {}
    headers |= {"Content-Type": "application/json"}
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a run's own gateways are behind no proxy
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    with direct.open(request, timeout=ANSWER_S) as answer:
        return json.loads(answer.read())


def show(console: Console, run: Path) -> None:
    """Prints them as a table, those that have been silent longest first."""
    for gateway, rows in sessions(run).items():
        table = Table(title=f"{gateway}: {len(rows)} sessions")
        for column in COLUMNS:
            table.add_column(SHOWN.get(column, column), no_wrap=column == "session")
        for row in sorted(rows, key=lambda row: -row["silent_s"]):
            table.add_row(*(Text(plain("–" if row[column] is None else str(row[column]))) for column in COLUMNS))
        console.print(table)
