"""Pictures of a data set's rows: their files as they are, and the places in the words where they stand."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.protocols.chat import words_of
from penstock.protocols.experience import PICTURE
from penstock.services.data import DataError
from penstock.services.data.json_rows import kind_of
from penstock.services.data.picture_files import PictureError, check_picture, scaled
from penstock.services.runtime.install import install
from penstock.services.runtime.user_folders import find_file

LONGEST_PATH = 4096
SHOWN = 200


def read_pictures(found: Any, beside: Sequence[Path], where: str) -> tuple[bytes, ...]:
    """The files of what a row has in its column: None, one picture, or a list. A picture is a map of ``bytes`` (or
    base64 of them), ``path`` or ``image``, as data sets have it, an image of Pillow, bytes, a data URI, or a path,
    which is looked for as the user's other files are, and in the folders of the files ``beside``. Raises `DataError`,
    which says ``where`` it is."""
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


def fitted(pictures: Sequence[bytes], least: int | None, most: int | None, where: str) -> tuple[bytes, ...]:
    """``pictures``, those with fewer pixels than ``least`` made larger, and those with more than ``most`` smaller
    (None: none is). Raises `DataError`, which says ``where`` they are."""
    try:
        return tuple(scaled(picture, least, most) for picture in pictures) if least or most else tuple(pictures)
    except PictureError as error:
        raise DataError(f"{where}: {error}") from error
    except ImportError as error:
        raise DataError(f"{where}: Pillow makes pictures smaller or larger; run: {install('pictures')}") from error


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


def _decoded(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise DataError(f"{where} has bytes that are a text, and no base64: {error}") from error


def _file_of(found: Any, beside: Sequence[Path], where: str) -> bytes:
    if isinstance(found, dict):
        if not {"bytes", "path", "image"} & found.keys():
            raise DataError(
                f"{where} is a map of {', '.join(map(str, found)) or 'nothing'}; it wants bytes, path or image"
            )
        if isinstance(found.get("bytes"), str):
            found = {"bytes": _decoded(found["bytes"], where)}
        found = found.get("bytes") or found.get("path") or found.get("image")
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
    if found.startswith("data:") and ";base64," in found[:LONGEST_PATH]:
        return _decoded(found.partition(";base64,")[2], where)
    found = found.removeprefix("file://")
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
        shown = found if len(found) <= SHOWN else f"{found[:SHOWN]}… (base64 goes into a map, as its bytes)"
        raise DataError(f"{where}: no such file: {shown}{looked}")
    content = path.read_bytes()
    if not content:
        raise DataError(f"{where}: {path} is empty")
    return content
