"""The command ``penstock page``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from penstock.pipeline.run.folder import make_folder, named
from penstock.pipeline.run.summary import check_run


def page(
    runs: Annotated[list[Path], typer.Argument(help="Runs' folders; several are drawn beside each other.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Write one file that opens without a server, instead of serving.", show_default=False, dir_okay=False
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Where it is served.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port.")] = 8430,
) -> None:
    """Look at runs in a browser: curves, a timeline of every process, and what was trained on, token by token.

    Also while they go on. A run that is over has the same as report.html in its folder. Tokens are there for steps that
    replay.archive keeps.

    For instance: penstock page runs/first-try
    or: penstock page runs/first-try runs/second-try --out both.html
    """
    runs = [named(folder) for folder in runs]
    for folder in runs:
        check_run(folder)
    if out is not None:
        from penstock.pipeline.page.build import write

        make_folder(out.parent, "--out")
        write(runs, out)
        typer.echo(f"written: {out}")
        return
    from penstock.pipeline.page.server import serve

    typer.echo(f"http://{host}:{port}/  (Ctrl-C ends it)")
    serve(runs, host, port)
