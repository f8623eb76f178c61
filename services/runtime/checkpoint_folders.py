"""Which checkpoints lie in a run's folder, by their names: whoever asks need not load torch."""

from __future__ import annotations

import json
import re
from pathlib import Path

MIXTURES = "reference"
"""Beside the checkpoints, where a reference that moves part of the way to the policy keeps what it is
(`reference.mix`), by the same names."""
ROLLED_BACK = "rolled-back"
"""In a run's folder: the version that it was taken back to, until its broker has seen it."""
TAIL_STEPS = 200
"""Of the ledger, that a trainer's checkpoint remembers: a critic that is further behind cannot follow any more."""
OPTIMIZER, STATE = "optimizer", "state.json"
"""In the folder trainer/ of a checkpoint."""
_NAME = re.compile(r"step-(\d{6,})")


def versions(folder: Path) -> list[int]:
    """The versions with a checkpoint below ``folder``, ascending. What has another name is the user's own."""
    matches = (_NAME.fullmatch(path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in matches if match)


def path_of(folder: Path, version: int) -> Path:
    """Where the checkpoint of ``version`` is, below ``folder``."""
    return folder / f"step-{version:06d}"


def optimizer_of(folder: Path, version: int) -> Path:
    """Where the optimizer's state lies in the checkpoint of ``version`` below ``folder``, once an update was made."""
    return path_of(folder, version) / "trainer" / OPTIMIZER


def without_optimizer(folder: Path, version: int) -> bool:
    """The checkpoint of ``version`` below ``folder`` has lost its optimizer's state (`checkpoint.keep_optimizer`): no
    run goes on from it."""
    try:
        had = json.loads((path_of(folder, version) / "trainer" / STATE).read_text()).get("optimizer", False)
    except (OSError, ValueError):
        return False  # it lacks more than that, which whoever goes on from it is told
    return had and not optimizer_of(folder, version).is_dir()


def latest(folder: Path) -> Path | None:
    """The newest checkpoint below ``folder``, if there is any."""
    found = versions(folder)
    return path_of(folder, found[-1]) if found else None
