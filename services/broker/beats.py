"""What every actor does, a line each second: actors.jsonl, which a run of months does not let grow for ever."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock.services.runtime.files import open_lines, write_whole

LIMIT = 64 << 20
"""Bytes. A file that is larger is thinned."""
WHOLE = 600
"""So many of the last lines are never thinned: what is wrong now is read from them."""

SYNC_S = 2.0
"""A disk that machines share has what was written this often: by it others see that a broker is at work."""


class Beats:
    """Appends lines, and leaves out every other one of the older ones when there are too many."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, open_lines(path)
        self._limit, self._synced_at = LIMIT, 0.0
        self._disk = ThreadPoolExecutor(1, "beats")
        self._syncing: Future[None] | None = None

    def write(self, members: dict[str, dict[str, Any]], queues: dict[str, int], lost: dict[str, float]) -> None:
        """One line."""
        row = {"time": time.time(), "actors": members, "queues": queues, "lost": lost}
        self._file.write(json.dumps(row, default=float) + "\n")
        if time.monotonic() - self._synced_at > SYNC_S and (self._syncing is None or self._syncing.done()):
            self._synced_at = time.monotonic()
            self._syncing = self._disk.submit(_sync, os.dup(self._file.fileno()))
        if self._file.tell() > self._limit:
            self._thin()

    def _thin(self) -> None:
        """Whoever reads it meanwhile has the file as it was."""
        self._file.close()
        lines = self._path.read_bytes().splitlines(keepends=True)
        last = lines[-WHOLE:]
        write_whole(self._path, b"".join(lines[:-WHOLE:2] + last))
        self._limit = max(LIMIT, 2 * sum(map(len, last)))  # of a thousand actors these alone may be as much
        self._file = open_lines(self._path)

    def close(self) -> None:
        """Closes the file."""
        self._disk.shutdown()
        self._file.close()


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError:  # a full disk, say; the next line may be there
        pass
    finally:
        os.close(descriptor)
