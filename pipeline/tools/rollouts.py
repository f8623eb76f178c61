"""`penstock rollouts`: what a run trained on, out of its archive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.run.summary import check_run
from penstock.services.broker import archive
from penstock.services.broker.samples import rows


def rollouts(run: str | Path, step: int | None = None) -> Iterator[dict[str, Any]]:
    """Every trajectory of the archived steps of the run in the folder ``run``, or of one ``step``: a flat row each.
    Raises `ConfigError` where there is no archive.

        pandas.DataFrame(penstock.rollouts("runs/first-try"))
    """
    folder = Path(run)
    check_run(folder)
    config = load(folder / "config.yaml")
    table = config.columns
    tokens = {column.name for column in table.columns if column.per == "token"}
    found = False
    for batch, _ in archive.read(folder, step or 0):
        if step is not None and batch.step != step:
            break
        for taken in batch.groups:
            found = True
            columns = {name: values for name, values in taken.columns.items() if name not in tokens}
            yield from rows(batch.step, archive.open_group(taken), columns)
    if not found:
        kept = [batch.step for batch, _ in archive.read(folder, 0)]
        if kept:
            raise ConfigError(f"--step: {step} is not in the archive; it has steps {min(kept)} to {max(kept)}")
        raise ConfigError(
            f"RUN: {folder} has no archive; before the run, set replay.archive=all, or to the last N steps"
        )
