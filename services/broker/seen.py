"""Pictures of what is kept for people: each a file of the run's folder, called by what is in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from penstock.services.data.picture_files import format_of
from penstock.services.runtime.files import write_whole

FOLDER = "pictures"
"""Of a run's folder."""


@lru_cache(maxsize=8)  # the answers of a group show the same
def name_of(picture: bytes) -> str:
    """Of its file: a hash, and the ending of the format that it begins like."""
    ending = format_of(picture)
    return hashlib.sha256(picture).hexdigest()[:24] + (ending and f".{ending}")


def keep(run: Path, pictures: Iterable[bytes]) -> None:
    """Writes down those of ``pictures`` that the folder of the ``run`` has not yet."""
    for picture in dict.fromkeys(pictures):
        path = run / FOLDER / name_of(picture)
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_whole(path, picture)
