"""`penstock rollouts`: what a run trained on, as rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from penstock.pipeline.config import ConfigError
from penstock.services.runtime.lines import line_of

OTHERS = (".csv", ".tsv", ".json", ".jsonl", ".txt", ".xlsx")


def rollouts(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    step: Annotated[Optional[int], typer.Option(help="Only this step.", show_default=False)] = None,  # noqa: UP045
    export: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write them to this parquet file, with their tokens.", show_default=False, dir_okay=False),
    ] = None,
) -> None:
    """Print every trajectory of a run's archive as a JSON object a line, or export them. Needs replay.archive.

    For instance: penstock rollouts runs/first-try --step 10 > step10.jsonl
    or: penstock rollouts runs/first-try --export rollouts.parquet
    and then: pandas.read_parquet("rollouts.parquet")
    """
    from penstock.pipeline.tools.rollouts import rollouts as read

    if export is not None and export.suffix in OTHERS:
        raise ConfigError(f"--export: {export} would be a parquet file; call it {export.with_suffix('.parquet')}")
    if export is not None:
        from penstock.pipeline.tools.export import export as write

        typer.echo(f"{write(run, export, step):,} trajectories in {export}")
        return
    for row in read(run, step):
        typer.echo(line_of(row).encode())  # as bytes: a terminal's own encoding may lack some of it
