"""The commands that say what a run takes of machines: ``penstock plan`` and ``penstock compose-env``."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.report.console import OwnConsole
from penstock.pipeline.resources.step_time import PROMPT
from penstock.pipeline.tools.arguments import FILE, OVERRIDES


def plan_run(
    file: FILE,
    overrides: OVERRIDES = None,
    gpus: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="GPUs to lay the run out on, e.g. 8xH100.", show_default=False),
    ] = None,
    length: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Mean tokens of a response; by default half of the longest.", show_default=False),
    ] = None,
    prompt: Annotated[int, typer.Option(min=0, help="Mean tokens of a prompt.")] = PROMPT,
) -> None:
    """Print what a run takes of GPUs and hosts, part by part; and which layouts fit GPUs that nobody has rented yet.

    Needs no GPU, and no weights: the model's config.json is enough. Exit code 1 where FILE as it is does not fit.

    For instance: penstock plan configs/grpo-8b.yaml --gpus 8xH100
    """
    from penstock.pipeline.tools.plan import show

    if not show(OwnConsole(), load(file, overrides), gpus, length, prompt):
        raise typer.Exit(1)


def compose_env(file: FILE, overrides: OVERRIDES = None) -> None:
    """Print a .env file for docker compose: shared memory and memory limits for the model of FILE.

    For instance: penstock compose-env configs/grpo-8b.yaml >> .env
    """
    from penstock.pipeline.resources.host import host_needs

    config = load(file, overrides)
    needs = host_needs(config)
    if needs is None:
        raise ConfigError("model.path: the model's sizes are not known here; give a folder with its config.json")
    typer.echo(f"# {file}: a version has {needs.version:.1f} GiB; checkpoints take {needs.checkpoints:.0f} GiB of disk")
    for name, value in needs.compose(config).items():
        typer.echo(f"{name}={value}")
