"""`penstock trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def trace(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The file to write.", dir_okay=False)] = Path("trace.json"),
) -> None:
    """Write what every process did when as a trace, for https://ui.perfetto.dev (open it there: it stays in the
    browser) or chrome://tracing.

    For instance: penstock trace runs/first-try --out first-try.trace.json
    """
    from penstock.pipeline.tools.trace import write_trace

    typer.echo(f"{write_trace(run, out):,} events in {out}: open it at https://ui.perfetto.dev")
