"""What a run was started with: its config file and its overrides, kept in the run's folder."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from penstock.pipeline.config.passwords import hide_password
from penstock.services.runtime.files import write_whole


@dataclass(frozen=True)
class Origin:
    """See the module's docstring."""

    file: str
    """The config file, as an absolute path."""
    overrides: tuple[str, ...] = ()
    started_in: str = field(default_factory=os.getcwd)
    """The folder that it was started from: what the config names may lie below it."""
    before_auto: tuple[str, ...] = ()
    """Overrides that give back what `run.placement: auto` has changed."""

    def with_overrides(self, more: list[str] | None) -> Origin:
        """With those that are given now; where a key is given again, that counts."""
        given = {key_of(override) for override in more or []}
        kept = [override for override in self.overrides if key_of(override) not in given]
        return replace(self, overrides=(*kept, *(more or [])))


def key_of(override: str) -> str:
    """``gate.max_lag`` of ``gate.max_lag=2``."""
    return override.partition("=")[0]


def write(folder: Path, origin: Origin) -> None:
    """Keeps it in a run's folder, without the password of a store."""
    overrides = [hide_password(text) if key_of(text).startswith("store") else text for text in origin.overrides]
    write_whole(folder / "origin.json", json.dumps({**asdict(origin), "overrides": overrides}, indent=2) + "\n")


def read(folder: Path) -> Origin | None:
    """Of the run in ``folder``; None where there is none."""
    try:
        row = json.loads((folder / "origin.json").read_text())
    except FileNotFoundError:
        return None
    lists = {name: tuple(row.get(name, ())) for name in ("overrides", "before_auto")}
    return Origin(**{**row, **lists})
