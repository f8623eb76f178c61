"""Pictures of a data set's rows: their files as they are, and the places in the words where they stand."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.protocols.chat import words_of
from penstock.protocols.experience import PICTURE
from penstock.services.data import DataError
from penstock.services.data.json_rows import kind_of
from penstock.services.data.picture_files import PictureError, check_picture
from penstock.services.runtime.user_folders import find_file

LONGEST_PATH = 4096


def read_pictures(found: Any, beside: Sequence[Path], where: str) -> tuple[bytes, ...]:
    """The files of what a row has in its column: None, one picture, or a list. A picture is a map of ``bytes`` or
    ``path``, as data sets of the hub have it, an image of Pillow, bytes, or a path, which is looked for as the user's
    other files are, and in the folders of the files ``beside``. Raises `DataError`, which says ``where`` it is."""
    if found is None:
        return ()
    every = found if isinstance(found, list | tuple) else [found]
    files = []
    for number, each in enumerate(every):
        place = f"{where}: picture {number}"
        try:
            files.append(file := _file_of(each, beside, place))
            check_picture(file)
        except DataError:
            raise
        except PictureError as error:
            name = each.get("path") if isinstance(each, dict) else each
            of = f" ({os.fspath(name)})" if isinstance(name, str | os.PathLike) else ""
            raise DataError(f"{place}{of}: {error}") from error
        except (OSError, ValueError) as error:  # a path too long, a picture of Pillow's that no PNG holds
            raise DataError(f"{place}: {str(error)[:80]}") from error
    return tuple(files)


def undecoded(rows: Any, column: str) -> Any:
    """``rows`` of ``datasets`` with the images of ``column`` as the files that they were."""
    import datasets

    if column not in picture_columns(rows):
        return rows
    kind: Any = datasets.Image(decode=False)
    several = not isinstance(rows.features[column], datasets.Image)
    return rows.cast_column(column, datasets.List(kind) if several else kind)


def picture_columns(rows: Any) -> list[str]:
    """The columns of ``rows`` of ``datasets`` that are an image each, or a list of them."""
    import datasets

    kinds = {name: (kind, getattr(kind, "feature", None)) for name, kind in rows.features.items()}
    return [name for name, found in kinds.items() if any(isinstance(each, datasets.Image) for each in found)]


def marked(words: str, pictures: Sequence[bytes]) -> str:
    """``words`` that say where each of ``pictures`` stands: all before them, where they do not say it themselves."""
    return words if PICTURE in words else PICTURE * len(pictures) + words


def marked_chat(messages: Sequence[Any], pictures: Sequence[bytes]) -> list[Any]:
    """As `marked`, of a chat: before the user's first words. A content in parts, as chat templates take it, becomes
    words with marks."""
    said = [_as_words(message) for message in messages]
    if any(PICTURE in message["content"] for message in said if _has_words(message)):
        return said
    for place, message in enumerate(said):
        if _has_words(message) and message.get("role") == "user":
            said[place] = {**message, "content": marked(message["content"], pictures)}
            break
    return said


def in_parts(content: str) -> list[dict[str, Any]]:
    """``content`` as templates take what shows pictures: its words, and a picture for each mark between them."""
    first, *others = content.split(PICTURE)
    parts = [{"type": "text", "text": first}] if first else []
    for words in others:
        parts += [{"type": "image"}, *([{"type": "text", "text": words}] if words else [])]
    return parts


def _has_words(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("content"), str)


def _as_words(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    try:
        return {**message, "content": words_of(content, "content", PICTURE)}
    except ValueError:  # told of where it becomes a prompt
        return message


def _file_of(found: Any, beside: Sequence[Path], where: str) -> bytes:
    if isinstance(found, dict):
        found = found.get("bytes") or found.get("path")
    if isinstance(found, os.PathLike):
        found = os.fspath(found)
    if hasattr(found, "save"):
        file = io.BytesIO()
        found.convert("RGB").save(file, "PNG")
        return file.getvalue()
    if isinstance(found, bytes) and found:
        return found
    if not isinstance(found, str) or not found:
        what = "empty" if found is None or isinstance(found, str | bytes) else kind_of(found)
        raise DataError(
            f"{where} is {what}; it must be an image of a data set or of Pillow, the bytes of a file, or its path"
        )
    if len(found) > LONGEST_PATH:
        raise DataError(f"{where} is a text of {len(found)} characters, no path; keep its file, and give the path")
    if "://" in found or found.startswith("data:"):
        raise DataError(f"{where} is {found[:80]}; no picture is fetched: keep its file, and give the path")
    places = [find_file(found), *(path.parent / found for path in beside)]
    path = next((place for place in places if place is not None and place.is_file()), None)
    if path is None and any(place is not None and place.is_dir() for place in places):
        raise DataError(f"{where}: {found} is a folder; name a file in it")
    if path is None:
        looked = f", also beside {', '.join(map(str, beside))}" if beside else ""
        raise DataError(f"{where}: no such file: {found}{looked}")
    content = path.read_bytes()
    if not content:
        raise DataError(f"{where}: {path} is empty")
    return content
