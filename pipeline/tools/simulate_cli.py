"""The command ``penstock simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from penstock.pipeline.config import load
from penstock.pipeline.report.console import OwnConsole
from penstock.pipeline.resources.step_time import PROMPT
from penstock.pipeline.tools.arguments import FILE, OVERRIDES

WIDTH = 110
"""Characters that the table takes, also where nobody says how wide the terminal is."""


def simulate(
    file: FILE,
    overrides: OVERRIDES = None,
    like: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A run's folder: things cost what they did there.", show_default=False),
    ] = None,
    costs: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A file of costs, as --save writes it.", show_default=False),
    ] = None,
    gpus: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Kind of GPU, e.g. H100: costs from its data sheet.", show_default=False),
    ] = None,
    length: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="With --gpus: tokens of a response; by default half of the longest.", show_default=False),
    ] = None,
    prompt: Annotated[float, typer.Option(help="With --gpus: tokens of a prompt.")] = PROMPT,
    cost: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Change a cost, e.g. --cost reward_s=4; docs/simulate.md has all.", show_default=False),
    ] = None,
    vary: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Compare values of a key, e.g. --vary gate.max_lag=0,1,2,4.", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps to simulate.")] = 60,
    save: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write the costs to this file, to be changed by hand.", show_default=False),
    ] = None,
) -> None:
    """Run the broker's own rules in virtual time: how fast would it be, and what would it wait for?

    Nothing is generated or trained: rollouts, rewards and trainer only take as long as real ones would.

    For instance: penstock simulate configs/grpo-8b.yaml --gpus H100 --vary gate.max_lag=0,1,2,4
    """
    from penstock.pipeline.simulate import costs as known
    from penstock.pipeline.tools.simulate import costs_of, show

    found = costs_of(like, costs, gpus, length, prompt, cost or ())
    if save:
        known.save(found(load(file, overrides)), save)
    show(OwnConsole(width=max(WIDTH, OwnConsole().width)), file, overrides or (), found, vary or (), steps)
