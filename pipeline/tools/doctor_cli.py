"""The command ``penstock doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.pipeline.config import load
from penstock.pipeline.report.console import OwnConsole
from penstock.pipeline.tools.arguments import FILE, OVERRIDES

doctor = typer.Typer(invoke_without_command=True)


@doctor.callback()
def doctor_machine(context: typer.Context) -> None:
    """Say what this machine has, and what it lacks; or, with a command, look closer at one thing.

    For instance: penstock doctor
    or: penstock doctor engine configs/gsm8k.yaml
    """
    if context.invoked_subcommand is None:
        from penstock.pipeline.tools.doctor import examine

        raise typer.Exit(0 if examine(OwnConsole()) else 1)


@doctor.command("engine")
def doctor_engine(
    file: FILE,
    overrides: OVERRIDES = None,
    prompts: Annotated[int, typer.Option(min=1, help="Of the run's prompts, answered under each version.")] = 16,
) -> None:
    """Check FILE's model on FILE's engine before a run spends money on it.

    Starts the engine, loads two versions, and compares the log-probabilities that it reports with transformers' own:
    mean, largest, KL, effective samples. Exit code 0 where they agree within weights.canary_tolerance.

    For instance: penstock doctor engine configs/gsm8k.yaml rollout.engine.max_sequences=16
    """
    from penstock.pipeline.tools.doctor_engine import examine_engine

    raise typer.Exit(0 if examine_engine(OwnConsole(), load(file, overrides), prompts) else 1)
