"""Where what is the user's own is looked for: where the process was started, and beside its config."""

from __future__ import annotations

import glob
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.services.runtime.errors import SetupError

FIRST = "PENSTOCK_FOLDERS_FIRST"
"""Environment variable: those that are looked in before the current one, as a list in JSON."""
VARIABLE = "PENSTOCK_FOLDERS"
"""Environment variable: the folders beside the current one, for the processes that this one starts, likewise."""


def look_in(folder: Path) -> None:
    """Modules and files are looked for in ``folder`` too, by this process and by those that it starts."""
    known = listed(VARIABLE)
    if str(folder.resolve()) not in known:
        os.environ[VARIABLE] = json.dumps([*known, str(folder.resolve())])


def look_first_in(found: Sequence[Path]) -> None:
    """Before the current folder and all others: a run that goes on has what it began with, wherever it is resumed."""
    os.environ[FIRST] = json.dumps([str(folder.resolve()) for folder in found])


def listed(variable: str) -> list[str]:
    """The folders in one of the two environment variables. Raises `SetupError`."""
    told = os.environ.get(variable) or "[]"
    try:
        return list(map(str, json.loads(told)))
    except (ValueError, TypeError):
        raise SetupError(f'{variable}={told}: folders are a list in JSON, e.g. ["/penstock/code"]') from None


def folders() -> list[Path]:
    """All of them: those to look first in, then the current one."""
    first, given = (map(Path, listed(variable)) for variable in (FIRST, VARIABLE))
    return list(dict.fromkeys([*first, Path.cwd(), *given]))


def find_folder(name: str) -> Path | None:
    """The folder called ``name``, absolute or below one of the folders."""
    return next((path for folder in folders() if (path := folder / name).is_dir()), None)


def folder_of(command: Sequence[str]) -> Path:
    """Where a command starts: the first of the folders that has a file which it names, or the current one."""

    def has(folder: Path, word: str) -> bool:
        try:
            return not Path(word).is_absolute() and (folder / word).is_file()
        except OSError:  # a whole program, say, is longer than a name may be
            return False

    return next((each for each in folders() if any(has(each, word) for word in command)), Path.cwd())


def path_with_ours() -> str:
    """PATH for programs of the user's: they are looked for beside this Python first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def find_file(name: str) -> Path | None:
    """The file called ``name``, absolute or below one of the folders."""
    return next((path for folder in folders() if (path := folder / name).is_file()), None)


def lacks_command(program: str, path: str | None = None) -> str:
    """Why ``program`` cannot be started, where commands are looked for in ``path`` (as PATH, which it is by default)
    and files below one of the folders; empty: it can."""
    if shutil.which(program, path=path):
        return ""
    found = find_file(program)
    if found and "/" not in program:
        return f"{program!r} is a file, and no command: write ./{program}"
    if found and not os.access(found, os.X_OK):
        return f"{found} is no program; make it one: chmod +x {program}"
    return "" if found else f"there is no command {program!r} here; install it, or give its path"


def find_files(name: str) -> list[Path]:
    """The file called ``name``, as `find_file`, or else those of the first of the folders that it is a pattern of, such
    as ``data/*.parquet`` or ``data/**/*.json``, by name; none where nothing matches."""
    if file := find_file(name):
        return [file]
    if glob.has_magic(name):
        for folder in folders():
            pattern = str(Path(glob.escape(str(folder))) / name)
            matching = glob.glob(pattern, recursive=True)  # noqa: PTH207 - passes over hidden files
            if files := sorted(path for path in map(Path, matching) if path.is_file()):
                return files
    return []
