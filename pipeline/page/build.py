"""The page as one file: markup, styles, scripts and data, that opens from a disk without a server."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.pipeline.config import ConfigError
from penstock.pipeline.page.data import RunFiles, as_json, names, unread
from penstock.pipeline.page.rollouts import LETTERS, PICTURES, TOKENS, groups_of
from penstock.services.runtime.files import write_whole

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("uPlot.iife.min.js", "dom.js", "charts.js", "timeline.js", "rollouts.js", "page.js")
STYLES = ("uPlot.min.css", "page.css")


def whole(folders: Sequence[Path], tokens: int = TOKENS, letters: int = LETTERS, pictures: int = PICTURES) -> str:
    """The page of these runs, with all that it shows; of the rollouts of each at most so many ``tokens`` and
    ``letters``, and so many of ``pictures``."""
    runs = []
    for folder, name in zip(folders, names(folders), strict=True):
        files = RunFiles(folder, name)
        try:
            found = files.data() | {"groups": groups_of(folder, tokens, letters=letters, pictures=pictures)}
        except ConfigError as error:  # as of a run of other code
            found = files.unread(unread(folder, error)) | {"groups": []}
        runs.append(found)
    return page({"runs": runs, "live": False})


def page(data: dict[str, Any]) -> str:
    """The page with ``data``: ``runs`` as of `RunFiles`, with their ``groups``; ``live``: it asks for what is new."""
    markup = (ASSETS / "page.html").read_text()
    parts = {
        "TITLE": html.escape(", ".join(run["name"] for run in data["runs"])),
        "STYLES": _joined(STYLES),
        "SCRIPTS": _joined(SCRIPTS),
        "DATA": as_json(data),
    }
    before, *rest = markup.split("{{")
    for piece in rest:  # one pass: what is put in is not looked into
        name, _, after = piece.partition("}}")
        before += parts[name] + after
    return before


def _joined(names: Sequence[str]) -> str:
    return "\n".join((ASSETS / name).read_text() for name in names)


def write(
    folders: Sequence[Path], path: Path, tokens: int = TOKENS, letters: int = LETTERS, pictures: int = PICTURES
) -> None:
    """Writes the page of these runs, see `whole`."""
    write_whole(path, whole(folders, tokens, letters, pictures))
