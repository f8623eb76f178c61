"""Files of JSON, a row a line, which may be cut short where their writer died."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def line_of(row: Row, default: Callable[[Any], Any] | None = None) -> str:
    """``row`` as JSON in one line without its end, with the letters of every script as they are. Escaped is what would
    end the line, move a terminal, or is none in UTF-8; ``default``: as of `json.dumps`."""
    said = json.dumps(row, ensure_ascii=False, default=default)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", said)


def read_lines(path: Path) -> list[Row]:
    """The rows of a JSONL file; a last line that was cut short is left out."""
    return list(each_line(path))


def each_line(path: Path) -> Iterator[Row]:
    """The same, one after the other."""
    if path.is_file():
        with path.open("rb") as lines:
            for line in lines:
                yield from parsed(line)


def parsed(line: bytes) -> list[Row]:
    """The row in a line; none where it was cut short."""
    try:
        return [json.loads(line)]
    except ValueError:
        return []


def lines_behind(path: Path, at: int) -> Iterator[bytes]:
    """The lines behind byte ``at`` of a file that is being written; the last one once it is whole."""
    if path.is_file():
        with path.open("rb") as lines:
            lines.seek(at)
            for line in lines:
                if not line.endswith(b"\n"):  # the next read would begin behind it, and give its end alone
                    return
                yield line


def rows_behind(path: Path, at: int) -> tuple[list[Row], int]:
    """Their rows, and where the last one ends: what is behind that is new the next time."""
    rows: list[Row] = []
    for line in lines_behind(path, at):
        at += len(line)
        rows += parsed(line)
    return rows, at
