"""The config's tiny model, made while somebody watches."""

from __future__ import annotations

import shutil
from pathlib import Path

from penstock.pipeline.config import Config, TinyModel
from penstock.pipeline.models.progress import progress
from penstock.pipeline.models.tiny import build
from penstock.services.data import open_source
from penstock.services.runtime.files import sync


def make_tiny(config: Config, folder: Path) -> None:
    """Makes the config's tiny model in ``folder``/model, and says how far it is. It is there once it is whole."""
    assert isinstance(config.model, TinyModel)
    with progress(config.model.warm_start.steps) as advance:
        partial, made = folder / ".model.partial", folder / "model"
        for left in (partial, made):  # of somebody who was killed here
            shutil.rmtree(left, ignore_errors=True)
        given = config.rollout.given.answers > 0
        build(config.model, open_source(config.prompts.train), partial, config.run.seed, advance, given)
        for written in (*partial.iterdir(), partial):
            sync(written)
        partial.rename(made)
        sync(folder)
