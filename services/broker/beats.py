"""What every actor does, a line each second: actors.jsonl, which a run of months does not let grow for ever."""

from __future__ import annotations

import json
import math
import os
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog

from penstock.services.runtime.files import open_lines, write_whole

log = structlog.get_logger()

LIMIT = 64 << 20
"""Bytes. A file that is larger is thinned."""
WHOLE = 600
"""So many of the last lines are never thinned: what is wrong now is read from them."""

_TIME, MOST_HEAD = re.compile(rb'"time": ?([0-9.]+)'), 64
TELL_S = 60.0
SYNC_S = 2.0
"""A disk that machines share has what was written this often: by it others see that a broker is at work."""


class Beats:
    """Appends lines, and keeps fewer of the older ones when there are too many."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, open_lines(path)
        self._limit, self._synced_at, self._told_at = LIMIT, 0.0, -math.inf
        self._disk = ThreadPoolExecutor(1, "beats")
        self._syncing: Future[None] | None = None

    def write(self, members: dict[str, dict[str, Any]], queues: dict[str, int], lost: dict[str, float]) -> None:
        """One line."""
        row = {"time": time.time(), "actors": members, "queues": queues, "lost": lost}
        try:
            self._file.write(json.dumps(row, default=float) + "\n")
            if time.monotonic() - self._synced_at > SYNC_S and (self._syncing is None or self._syncing.done()):
                self._synced_at = time.monotonic()
                self._syncing = self._disk.submit(_sync, os.dup(self._file.fileno()))
            if self._file.tell() > self._limit:
                self._thin()
        except OSError as error:  # the run does not end of it: a full disk its launcher speaks of
            self._limit = min(2 * self._limit, 16 * LIMIT)  # or all would be read again at each line
            if time.monotonic() - self._told_at > TELL_S:
                self._told_at = time.monotonic()
                log.warning("what actors do cannot be written down", file=self._path.name, error=str(error))

    def _thin(self) -> None:
        """Whoever reads it meanwhile has the file as it was."""
        lines = self._path.read_bytes().splitlines(keepends=True)
        older, last = lines[:-WHOLE], lines[-WHOLE:]
        room = max(LIMIT // 2 - sum(map(len, last)), LIMIT // 4)
        write_whole(self._path, b"".join([*spread_over_time(older, room), *last]))
        self._limit = max(LIMIT, 2 * sum(map(len, last)))  # of a thousand actors these alone may be as much
        before, self._file = self._file, open_lines(self._path)
        before.close()

    def close(self) -> None:
        """Closes the file."""
        self._disk.shutdown()
        self._file.close()


def spread_over_time(lines: list[bytes], room: int) -> list[bytes]:
    """Of ``lines``, some that have ``room`` bytes together, as far from each other in time as that allows: however
    often a run's lines were thinned, its first hours are seen as its last ones are."""
    sizes = sum(map(len, lines))
    if sizes <= room or not lines:
        return lines
    times = [float(found[1]) if (found := _TIME.search(line[:MOST_HEAD])) else 0.0 for line in lines]
    most = max(1, room * len(lines) // sizes)
    apart, kept, next_at = (times[-1] - times[0]) / most, [], -math.inf
    for line, at in zip(lines, times, strict=True):
        if at >= next_at:
            kept.append(line)
            next_at = at + apart
    return kept


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError:  # a full disk, say; the next line may be there
        pass
    finally:
        os.close(descriptor)
