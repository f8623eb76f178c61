"""What every actor did, out of actors.jsonl: of a long run few rows, and each time only what is new of the file."""

from __future__ import annotations

from collections import deque
from itertools import chain
from pathlib import Path
from typing import Any

from penstock.pipeline.run.summary import lines_behind, parsed

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
        self._latest: deque[bytes] = deque(maxlen=LATEST)

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
        latest = list(chain.from_iterable(map(parsed, self._latest)))
        earlier = [row for row in self._kept if latest and row["time"] < latest[0]["time"]]
        return self._kept, earlier + latest
