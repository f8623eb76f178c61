"""What every actor did, out of actors.jsonl: of a long run few rows, and each time only what is new of the file."""

from __future__ import annotations

import secrets
from collections import deque
from itertools import chain
from pathlib import Path
from typing import Any

from penstock.services.runtime.lines import lines_behind, parsed

BEATS = 1500
"""Points over time that are kept, from end to end: of more, every second, every third, … is. While a page is open they
become twice as many, and then every other one goes."""
LATEST = 120
"""Of the last ones all are looked at: a row a second."""
Rows = list[dict[str, Any]]


class Beats:
    """The rows of the file at ``path``, which the broker appends to, and now and then writes anew, with fewer rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin(0)

    def _begin(self, file: int) -> None:
        self._file, self._at, self._count, self._every = file, 0, 0, 0
        self._kept: Rows = []
        self._latest: deque[bytes | Rows] = deque(maxlen=LATEST)
        self._series = secrets.token_hex(4)

    @property
    def seen(self) -> str:
        """How far those that are kept go now, for `behind`."""
        return f"{self._series}-{len(self._kept)}"

    def behind(self, seen: str) -> int:
        """How many of those that are kept were there at an earlier `seen`; 0 where they are others since: thinned, or
        read by another process."""
        series, _, count = seen.partition("-")
        return int(count) if series == self._series and count.isdigit() else 0

    def read(self) -> tuple[Rows, Rows]:
        """Those that are kept; and the same with all of the latest, for who asks what is going on now."""
        if not self._path.is_file():
            return [], []
        about = self._path.stat()
        if about.st_ino != self._file or about.st_size < self._at:
            self._begin(about.st_ino)
        if not self._every:  # a run writes a row a second: of a week's, few are taken apart
            self._every = max(1, -(-sum(1 for _ in lines_behind(self._path, 0)) // BEATS))
        for line in lines_behind(self._path, self._at):
            if self._count % self._every == 0:
                self._kept += parsed(line)
            self._at, self._count = self._at + len(line), self._count + 1
            self._latest.append(line)
        if len(self._kept) > 2 * BEATS:
            self._kept, self._every = self._kept[::2], 2 * self._every
            self._series = secrets.token_hex(4)
        for place, each in enumerate(self._latest):
            if isinstance(each, bytes):
                self._latest[place] = parsed(each)
        latest = list(chain.from_iterable(each for each in self._latest if not isinstance(each, bytes)))
        earlier = [row for row in self._kept if latest and row["time"] < latest[0]["time"]]
        return self._kept, earlier + latest
