"""The config's tiny model, made while somebody watches."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.progress import Progress

from penstock.pipeline.config import Config, TinyModel
from penstock.pipeline.models.tiny import build
from penstock.pipeline.report.console import OwnConsole
from penstock.services.data import open_source
from penstock.services.runtime.files import sync


def make_tiny(config: Config, folder: Path) -> None:
    """Makes the config's tiny model in ``folder``/model, with a progress bar. It is there once it is whole."""
    assert isinstance(config.model, TinyModel)
    with Progress(console=OwnConsole(stderr=True)) as progress:
        task = progress.add_task("warm start", total=config.model.warm_start.steps)

        def advance(step: int, _steps: int, loss: float) -> None:
            progress.update(task, completed=step, description=f"warm start, loss {loss:.3f}")

        partial, made = folder / ".model.partial", folder / "model"
        for left in (partial, made):  # of somebody who was killed here
            shutil.rmtree(left, ignore_errors=True)
        given = config.rollout.given.answers > 0
        build(config.model, open_source(config.prompts.train), partial, config.run.seed, advance, given)
        for written in (*partial.iterdir(), partial):
            sync(written)
        partial.rename(made)
        sync(folder)
