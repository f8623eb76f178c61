"""Pictures that the policy was shown, made small enough to be in a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from pathlib import Path

from penstock.services.broker import seen
from penstock.services.data.picture_files import PictureError, open_picture

SIDE = 448
"""Pixels of its longer side, at most."""


class Thumbnails:
    """Of a page that has ``room`` for so many letters of them. ``folder``: of the run, where kept ones are files."""

    def __init__(self, folder: Path, room: int) -> None:
        self._kept, self._room = folder / seen.FOLDER, room

    def of(self, pictures: Iterable[bytes]) -> dict[str, str]:
        """Each as a URL with all of it, by its name, while there is room."""
        found: dict[str, str] = {}
        for picture in dict.fromkeys(pictures):
            if self._room > 0 and (small := _kept(name := seen.name_of(picture), picture)):
                found[name] = small
                self._room -= len(small)
        return found

    def of_files(self, names: Iterable[str]) -> dict[str, str]:
        """As `of`, of those that the run's folder has."""
        paths = (self._kept / Path(name).name for name in dict.fromkeys(names))
        return self.of(path.read_bytes() for path in paths if self._room > 0 and path.is_file())


_KEPT: dict[str, str] = {}
"""By name: a page that stays open asks again and again."""
KEPT = 1024


def _kept(name: str, picture: bytes) -> str:
    if name not in _KEPT:
        while len(_KEPT) >= KEPT:
            del _KEPT[next(iter(_KEPT))]
        _KEPT[name] = _thumbnail(picture)
    return _KEPT[name]


def _thumbnail(picture: bytes) -> str:
    """Empty: there is none to be had, of a picture that is broken, or where Pillow is not installed."""
    file = io.BytesIO()
    try:
        image = open_picture(picture)
        image.thumbnail((SIDE, SIDE))
        image.save(file, "JPEG", quality=80)
    except (PictureError, ImportError):
        return ""
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
