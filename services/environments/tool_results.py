"""What the policy reads, and sees, of what its tools give."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.protocols.experience import PICTURE
from penstock.services.data.pictures import read_pictures

if TYPE_CHECKING:
    from mcp.types import CallToolResult

Parts = tuple[str | bytes, ...]
"""Words, and pictures between them, each as its file."""
ONLY_WORDS = "<image/>"
"""What a result says where it spells out the mark of a picture beside others that are shown."""


def of_returned(found: Any) -> Parts:
    """Of what a function has returned: text; an image of Pillow's; a list of both; anything else as JSON. Raises
    `DataError`."""
    if isinstance(found, str):
        return (found,)
    every = found if isinstance(found, list | tuple) else [found]
    if not any(map(_is_image, every)):
        return (json.dumps(found, default=str),)
    parts: list[str | bytes] = []
    for each in every:
        if _is_image(each):
            parts += read_pictures(each, [], "what it returned")
        else:
            parts.append(each if isinstance(each, str) else json.dumps(each, default=str))
    return tuple(parts)


def of_server(name: str, result: CallToolResult, shows: bool) -> Parts:
    """Of the ``result`` of the tool ``name`` of a server: its texts, a line each, and its pictures, where the
    environment ``shows`` any; of all else, what it is. Raises `DataError`, `ValueError`."""
    parts: list[str | bytes] = [f"error: {name}: "] if result.is_error else []
    for place, block in enumerate(result.content):
        parts += ["\n"] if place else []
        held = getattr(block, "resource", block)
        text = getattr(held, "text", None)
        about = getattr(held, "uri", None) or getattr(held, "mime_type", None) or ""
        if shows and block.type == "image":
            parts += read_pictures(base64.b64decode(block.data, validate=True), [], "its result")
        else:
            parts.append(text if text is not None else f"[{block.type} {about}]")
    return tuple(parts)


def as_messages(results: Sequence[Parts], longest: int) -> tuple[list[dict[str, str]], list[bytes]]:
    """A message for each of ``results``, of at most so many characters, and the pictures that all of them show."""
    pictures = [part for parts in results for part in parts if isinstance(part, bytes)]
    return [{"role": "tool", "content": _words(parts, longest, bool(pictures))} for parts in results], pictures


def _words(parts: Parts, longest: int, shown: bool) -> str:
    words = []
    for part in parts:
        if isinstance(part, bytes):
            words.append(PICTURE)
            continue
        part = part[:longest].encode("utf-8", "replace").decode()  # half of a pair, say
        longest -= len(part)
        words.append(part.replace(PICTURE, ONLY_WORDS) if shown else part)
    return "".join(words)


def _is_image(found: Any) -> bool:
    return type(found).__module__.partition(".")[0] == "PIL" and hasattr(found, "save")
