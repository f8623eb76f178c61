"""Which checkpoints lie in a run's folder, by their names: whoever asks need not load torch."""

from __future__ import annotations

import re
from pathlib import Path

MIXTURES = "reference"
"""Beside the checkpoints, where a reference that moves part of the way to the policy keeps what it is
(`reference.mix`), by the same names."""
ROLLED_BACK = "rolled-back"
"""In a run's folder: the version that it was taken back to, until its broker has seen it."""
TAIL_STEPS = 200
"""Of the ledger, that a trainer's checkpoint remembers: a critic that is further behind cannot follow any more."""
_NAME = re.compile(r"step-(\d{6,})")


def versions(folder: Path) -> list[int]:
    """The versions with a checkpoint below ``folder``, ascending. What has another name is the user's own."""
    matches = (_NAME.fullmatch(path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in matches if match)


def path_of(folder: Path, version: int) -> Path:
    """Where the checkpoint of ``version`` is, below ``folder``."""
    return folder / f"step-{version:06d}"


def latest(folder: Path) -> Path | None:
    """The newest checkpoint below ``folder``, if there is any."""
    found = versions(folder)
    return path_of(folder, found[-1]) if found else None
