"""The command that installs a part of Penstock which is missing here."""

from __future__ import annotations

import json
import os
import shlex
import sys
from importlib.metadata import distributions
from pathlib import Path


def in_container() -> bool:
    """Of an image of ours, which is all that the run's other containers have."""
    return bool(os.environ.get("PENSTOCK_ONE_PER_HOST"))


def install(extra: str) -> str:
    """E.g. ``.venv/bin/pip install -e '.[data]'`` in a clone; ``pip install 'penstock[data]'`` where it was installed
    as a package; in a container, what builds its image with it."""
    if in_container():
        return f"PENSTOCK_EXTRAS={extra} docker compose build"
    pip = Path(sys.executable).with_name("pip")
    command = _short(pip) if sys.prefix != sys.base_prefix and pip.is_file() else f"{sys.executable} -m pip"
    return f"{command} install {_target(extra)}"


def _target(extra: str) -> str:
    # In a clone there are two: what setuptools left in the folder, and what pip installed, which alone knows.
    said = (found.read_text("direct_url.json") for found in distributions(name="penstock"))
    origin = json.loads(next(filter(None, said), "{}"))
    source = origin.get("url", "").removeprefix("file://")
    if not source or not Path(source).is_dir():
        return shlex.quote(f"penstock[{extra}]")
    edit = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return edit + shlex.quote(f"{_short(Path(source))}[{extra}]")


def _short(path: Path) -> str:
    """Relative to where we are, where it lies below."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
