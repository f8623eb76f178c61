"""The config's tiny model, made while somebody watches."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from penstock.pipeline.config import Config, TinyModel
from penstock.pipeline.models.tiny import build
from penstock.services.data import open_source


def make_tiny(config: Config, folder: Path) -> None:
    """Makes the config's tiny model in ``folder``/model, with a progress bar."""
    assert isinstance(config.model, TinyModel)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("warm start", total=config.model.warm_start.steps)

        def advance(step: int, _steps: int, loss: float) -> None:
            progress.update(task, completed=step, description=f"warm start, loss {loss:.3f}")

        source = open_source(config.prompts.train)
        build(config.model, source, folder / "model", config.run.seed, advance)
