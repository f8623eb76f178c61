"""Arguments that several commands have, and what they say alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

FILE = Annotated[Path, typer.Argument(help="The run's config, e.g. configs/quickstart.yaml.", show_default=False)]
OVERRIDES = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this form
    typer.Argument(help="Overrides, e.g. gate.max_lag=0 trainer.optimizer.lr=1e-5.", show_default=False),
]


def warn(text: str) -> None:
    """Says it where it spoils no command's output."""
    typer.echo(f"warning: {text}", err=True)
