"""`penstock keys`: keys of their own for agents elsewhere."""

from __future__ import annotations

import json
import re
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Optional

import typer
import yaml
from rich.table import Table
from rich.text import Text

from penstock.pipeline.config import ConfigError
from penstock.pipeline.report.console import OwnConsole
from penstock.protocols.keys import make_guest, save_client
from penstock.services.runtime.files import write_whole

app = typer.Typer(
    help="Keys by which agents on other machines come in, each with what it may take.", no_args_is_help=True
)

RUN = Annotated[Path, typer.Argument(help="The folder of a run with gateways.", show_default=False)]
NAME = Annotated[str, typer.Argument(help="Whose key it is, e.g. alice.", show_default=False)]
SOME = Optional[int]  # noqa: UP045


@app.command()
def add(
    run: RUN,
    name: NAME,
    sessions: Annotated[SOME, typer.Option(min=1, help="Sessions held at once, at each gateway.")] = None,
    turns_per_minute: Annotated[SOME, typer.Option(min=1, help="Turns asked of each gateway in a minute.")] = None,
    days: Annotated[SOME, typer.Option(min=1, help="Valid for so long; else until it is revoked.")] = None,
    out: Annotated[Optional[Path], typer.Option(help="The file for AgentClient; default: NAME.keys.json.")] = None,  # noqa: UP045
) -> None:
    """Make a key. It is printed once, for HTTP; a file for penstock.AgentClient is written beside.

    For instance: penstock keys add runs/agent alice --sessions 64 --turns-per-minute 600
    and then, elsewhere: AgentClient("tcp://trainer:8421", keys="alice.keys.json")
    """
    from penstock.services.gateway.access import NamedKey, digest

    kept, shown = _folder(run) / f"{_checked(name)}.json", secrets.token_urlsafe(32)
    if kept.exists():
        raise ConfigError(f"NAME: {name} has a key already; penstock keys revoke {run} {name}, or choose another name")
    guest = make_guest(run / "keys") if (run / "keys" / "client.json").is_file() else None
    file = out or Path(f"{name}.keys.json")
    if guest is not None:
        try:
            save_client(file, guest)
        except OSError as error:
            raise ConfigError(f"--out: cannot write {file}: {error.strerror}; choose another file") from None
    expires = datetime.now(UTC) + timedelta(days=days) if days else None
    key = NamedKey(
        sha256=digest(shown),
        curve_public=guest.client_public if guest else "",
        sessions=sessions,
        turns_per_minute=turns_per_minute,
        expires=expires,
    )
    kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_whole(kept, key.model_dump_json() + "\n", mode=0o600)
    console = OwnConsole()
    console.print(f"over HTTP: {shown}", soft_wrap=True, highlight=False)
    zmq = (
        f'AgentClient("{_address(run)}", keys="{file}")'
        if guest
        else "gateway.bind is on the loopback, and asks for no keys"
    )
    console.print(f"over ZeroMQ: {zmq}", soft_wrap=True, highlight=False, markup=False)
    if not ((yaml.safe_load((run / "config.yaml").read_text()) or {}).get("gateway") or {}).get("count"):
        words = f"note: no gateway reads it: {run} has gateway.count=0; agents need a run with gateway.count=1"
        console.print(words, soft_wrap=True, highlight=False, markup=False)


@app.command(name="list")
def list_keys(run: RUN) -> None:
    """List the keys that there are, and what each may take.

    For instance: penstock keys list runs/agent
    """
    from penstock.services.gateway.access import NamedKey

    table = Table("name", "sessions", "turns a minute", "expires")
    for file in sorted(_folder(run).glob("*.json")):
        try:
            key = NamedKey.model_validate_json(file.read_text())
        except (OSError, ValueError) as error:
            table.add_row(file.stem, "cannot be read", Text(str(error).splitlines()[0]), "")
            continue
        ends = f"{key.expires:%Y-%m-%d %H:%M} UTC" + ("" if key.valid else ", over") if key.expires else "–"
        table.add_row(file.stem, str(key.sessions or "–"), str(key.turns_per_minute or "–"), ends)
    OwnConsole().print(table)


@app.command()
def revoke(run: RUN, name: NAME) -> None:
    """Take a key away: within a second or two nothing is answered to it any more.

    For instance: penstock keys revoke runs/agent alice
    """
    kept = _folder(run) / f"{_checked(name)}.json"
    if not kept.exists():
        raise ConfigError(f"NAME: there is no key {name!r}; penstock keys list {run} has them")
    kept.unlink()
    typer.echo(f"{name} is revoked")


def _address(run: Path) -> str:
    """Where the run's first gateway is reached, as far as is known."""
    try:
        return str(json.loads(min((run / "gateways").glob("*.json")).read_text())["zmq"])
    except (OSError, ValueError, KeyError):  # none is there yet, or any more
        return "tcp://…"


def _folder(run: Path) -> Path:
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"RUN: {run} is no run's folder: it has no config.yaml; start the run first")
    return run / "keys" / "agents"


def _checked(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise ConfigError(f"NAME: {name!r}: letters, digits, dots, dashes and underscores, at most 64")
    return name
