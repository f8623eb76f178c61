"""Pictures that the policy was shown, made small enough to be in a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from penstock.services.broker import seen
from penstock.services.data.picture_files import PictureError, open_picture
from penstock.services.runtime.kept import Kept

SIDE = 448
"""Pixels of its longer side, at most."""


class Thumbnails:
    """Of a page that has ``room`` for so many letters of them. ``folder``: of the run, where kept ones are files."""

    def __init__(self, folder: Path, room: int) -> None:
        self._kept, self._room = folder / seen.FOLDER, room

    def of(self, pictures: Iterable[bytes]) -> dict[str, str]:
        """Each as a URL with all of it, by its name, while there is room."""
        return self._fitting((seen.name_of(each), partial(bytes, each)) for each in dict.fromkeys(pictures))

    def of_files(self, names: Iterable[str]) -> dict[str, str]:
        """As `of`, of those that the run's folder has."""
        paths = {name: self._kept / Path(name).name for name in names}
        return self._fitting((name, path.read_bytes) for name, path in paths.items() if path.is_file())

    def _fitting(self, files: Iterable[tuple[str, Callable[[], bytes]]]) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, read in files:
            if self._room > 0 and (small := KEPT.get(name, partial(_thumbnail, read))):
                found[name] = small
                self._room -= len(small)
        return found


KEPT: Kept[str] = Kept(1024)
"""By name: a page that stays open asks again and again."""


def _thumbnail(read: Callable[[], bytes]) -> str:
    """Empty: there is none to be had, of a picture that is broken, or where Pillow is not installed."""
    file = io.BytesIO()
    try:
        image = open_picture(read())
        image.thumbnail((SIDE, SIDE))
        image.save(file, "JPEG", quality=80)
    except (PictureError, ImportError):
        return ""
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
