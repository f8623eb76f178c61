"""The command ``penstock page``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.run.folder import named
from penstock.pipeline.run.summary import check_run
from penstock.pipeline.tools.arguments import warn
from penstock.pipeline.tools.output import output
from penstock.protocols.keys import is_loopback
from penstock.protocols.mailbox import AddressError
from penstock.services.gateway.ports import address, listen


def page(
    runs: Annotated[list[Path], typer.Argument(help="Runs' folders; several are drawn beside each other.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Write one file that opens without a server, instead of serving.", show_default=False, dir_okay=False
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Where it is served.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Its port; 0: any that is free.")] = 8430,
) -> None:
    """Look at runs in a browser: curves, a timeline of every process, and what was trained on, token by token.

    Also while they go on. A run that is over has the same as report.html in its folder. Tokens are there for steps that
    replay.archive keeps.

    For instance: penstock page runs/first-try
    or: penstock page runs/first-try runs/second-try --out both.html
    """
    runs = [named(folder) for folder in runs]
    unread: list[ConfigError] = []
    for folder in runs:
        check_run(folder)
        try:
            load(folder / "config.yaml")
        except ConfigError as error:  # as of a run of other code: the others are shown
            unread.append(ConfigError(f"RUN: {folder}: {error}"))
    if len(unread) == len(runs):
        raise unread[0]
    for why in unread:
        warn(str(why))
    if out is not None:
        from penstock.pipeline.page.build import write

        with output(out, "--out") as file, Console(stderr=True).status(f"writing {out} …"):
            write(runs, file)
        typer.echo(f"written: {out}")
        return
    from penstock.pipeline.page.server import make_app, serve

    app = make_app(runs, loopback=is_loopback(f"tcp://{address(host, port)}"))
    try:
        listening = listen("--host, --port", host, port)
    except AddressError as error:
        raise ConfigError(str(error)) from None
    typer.echo(f"http://{address(host, listening.getsockname()[1])}/  (Ctrl-C ends it)")
    serve(app, listening)
