"""Where what is the user's own is looked for: where the process was started, and beside its config."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

FIRST = "PENSTOCK_FOLDERS_FIRST"
"""Environment variable: those that are looked in before the current one."""
VARIABLE = "PENSTOCK_FOLDERS"
"""Environment variable: the folders beside the current one, for the processes that this one starts."""


def look_in(folder: Path) -> None:
    """Modules and files are looked for in ``folder`` too, by this process and by those that it starts."""
    known = os.environ.get(VARIABLE, "").split(os.pathsep)
    if str(folder.resolve()) not in known:
        os.environ[VARIABLE] = os.pathsep.join([*filter(None, known), str(folder.resolve())])


def look_first_in(found: Sequence[Path]) -> None:
    """Before the current folder and all others: a run that goes on has what it began with, wherever it is resumed."""
    os.environ[FIRST] = os.pathsep.join(str(folder.resolve()) for folder in found)


def folders() -> list[Path]:
    """All of them: those to look first in, then the current one."""
    first, given = (
        [Path(folder) for folder in os.environ.get(name, "").split(os.pathsep) if folder] for name in (FIRST, VARIABLE)
    )
    return list(dict.fromkeys([*first, Path.cwd(), *given]))


def may_be_on_hub(path: str) -> bool:
    """A model's ``path`` may be a name of the Hugging Face hub: it is no folder here, and does not look like one."""
    return not (path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).exists())


def find_folder(name: str) -> Path | None:
    """The folder called ``name``, absolute or below one of the folders."""
    return next((path for folder in folders() if (path := folder / name).is_dir()), None)


def find_file(name: str) -> Path | None:
    """The file called ``name``, absolute or below one of the folders."""
    return next((path for folder in folders() if (path := folder / name).is_file()), None)
