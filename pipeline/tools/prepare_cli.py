"""`penstock prepare`: a run's folder, for actors that are started one by one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.pipeline.config import TinyModel, load
from penstock.pipeline.config.origin import Origin
from penstock.pipeline.tools.arguments import FILE, OVERRIDES
from penstock.services.runtime.plain import plain


def prepare(
    file: FILE,
    overrides: OVERRIDES = None,
    folder: Annotated[Path, typer.Option(help="The run's folder.")] = Path("runs/served"),
    looked: Annotated[bool, typer.Option(hidden=True)] = False,
    tell: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Make FOLDER ready for actors that are started one by one: its config.yaml, and a tiny model with its warm start.

    Looks at data, model and functions first, as `penstock run` does; what this machine lacks, GPUs and Redis among it,
    may be another machine's, and is a note.
    Said again, it makes a stopped or failed run ready to go on; for one that is complete it says so, and exits with 2.
    `penstock run` does all of this by itself.

    For instance: penstock prepare configs/quickstart.yaml trainer.steps=50 --folder runs/served
    """
    from penstock.pipeline.run.finish import told

    with told(folder, tell):
        _prepare(file, overrides or [], folder, looked, tell)


def _prepare(file: Path, overrides: list[str], folder: Path, looked: bool, tell: bool) -> None:
    from penstock.pipeline.preflight.look import look
    from penstock.pipeline.preflight.steps import counted, done_in
    from penstock.pipeline.resources.host import to_scale, too_small
    from penstock.pipeline.run.folder import began_in, open_folder
    from penstock.pipeline.run.resume import STORE, with_password
    from penstock.services.runtime.install import in_container

    config = load(file, overrides)
    if tell or STORE in os.environ:  # which a cluster's secret has, or lacks
        config = with_password(config)
    config, line = counted(config, began_in(folder), done_in(folder))
    if line:
        typer.echo(line, err=True)
    if not looked:
        report = look(config, folder)
        report.problems += too_small(config, os.environ) + report.packages * in_container()
        report.check(elsewhere=True)
        for note in [*report.remarks, *to_scale(config, os.environ)]:
            typer.echo(f"note: {plain(note)}", err=True)
    for change in open_folder(config, folder, Origin(str(file.resolve()), tuple(overrides))):
        typer.echo(f"changed: {change}", err=True)
    if isinstance(config.model, TinyModel) and not (folder / "model" / "config.json").is_file():
        from penstock.pipeline.models.make_tiny import make_tiny  # imports torch

        make_tiny(config, folder)
    typer.echo(f"ready: {folder}")
