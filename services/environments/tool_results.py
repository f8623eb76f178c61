"""What the policy reads, and sees, of what its tools give."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from penstock.protocols.experience import PICTURE
from penstock.services.data.pictures import read_pictures

if TYPE_CHECKING:
    from mcp.types import CallToolResult

Cut = Literal["end", "middle", "start"]
LEFT_OUT = "\n[{} characters are left out]\n"
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


def as_messages(results: Sequence[Parts], longest: int, cut: Cut = "end") -> tuple[list[dict[str, str]], list[bytes]]:
    """A message for each of ``results``, of at most so many characters of its own, and the pictures that all of them
    show, which no ``cut`` takes out."""
    pictures = [part for parts in results for part in parts if isinstance(part, bytes)]
    shown = bool(pictures)
    return [{"role": "tool", "content": "".join(_words(parts, longest, cut, shown))} for parts in results], pictures


def _words(parts: Parts, longest: int, cut: Cut, shown: bool) -> Iterator[str]:
    over = sum(len(part) for part in parts if isinstance(part, str)) - longest
    first = {"end": longest, "middle": longest // 2, "start": 0}[cut]
    gap, begin = range(first, first + max(0, over)), 0  # of the characters of all parts, those that are left out
    for part in parts:
        if isinstance(part, bytes):
            yield PICTURE
            continue
        place = range(begin, begin := begin + len(part))
        kept = part[: max(0, gap.start - place.start)], part[max(0, gap.stop - place.start) :]
        if cut != "end" and gap and gap.start in place:
            yield _plain(kept[0], shown) + LEFT_OUT.format(len(gap)) + _plain(kept[1], shown)
        else:
            yield _plain("".join(kept), shown)


def _plain(part: str, shown: bool) -> str:
    part = part.encode("utf-8", "replace").decode()  # half of a pair, say
    return part.replace(PICTURE, ONLY_WORDS) if shown else part


def _is_image(found: Any) -> bool:
    return type(found).__module__.partition(".")[0] == "PIL" and hasattr(found, "save")
