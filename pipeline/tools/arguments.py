"""Arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

FILE = Annotated[Path, typer.Argument(help="The run's config, e.g. configs/quickstart.yaml.", show_default=False)]
OVERRIDES = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this form
    typer.Argument(help="Overrides, e.g. gate.max_lag=0 trainer.optimizer.lr=1e-5.", show_default=False),
]
