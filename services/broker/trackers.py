"""What a run tells trackers: numbers of steps and evaluations, and some of each step's answers.

A thread of its own says it all: whatever a tracker does, whom it waits for and how it fails, the broker does not wait.
A tracker that fails is given up with a warning; the run's own files have everything.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import structlog

from penstock.services.broker.own_tracker import OwnTracker
from penstock.services.broker.tracker_libraries import MAKERS, Columns, Rows

log = structlog.get_logger()

WAITING = 10_000
"""Rows that may wait for slow trackers; of more, those that come are left out."""
WAITING_BYTES = 64 << 20
"""Of experience, that tables are to be made of, likewise."""
GIVEN_UP = object()
CLOSE_S = 20.0
"""What a tracker has to send the last of it."""


@runtime_checkable
class Tracker(Protocol):
    """One of them."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one step, by name."""

    def table(self, name: str, columns: Columns, rows: Rows) -> None:
        """Rows of one step, which is the first column of each."""

    def close(self, error: str | None) -> None:
        """The run is over, for now; ``error``: why it failed, where it did."""


class Table(NamedTuple):
    """What `Tracker.table` is given."""

    name: str
    columns: Columns
    rows: Rows


class Trackers:
    """All that the config names, a library's or ``module:Class`` of the user's own; ``project`` is what they file the
    run of ``folder`` under, ``config`` what it is made with."""

    def __init__(self, names: Sequence[str], folder: Path, project: str, config: Mapping[str, Any]) -> None:
        self._said: queue.Queue[Callable[[], Callable[[Tracker], Any] | None] | None] = queue.Queue(WAITING)
        self._held, self._lock = 0, threading.Lock()
        """Bytes that wait."""
        self._error: str | None = None
        self._shown = -1
        """The last step of which there was a table."""
        makers = {name: MAKERS.get(name, partial(OwnTracker, name)) for name in names}
        self._made = [(name, partial(make, folder, project, config)) for name, make in makers.items()]
        self._thread = threading.Thread(target=self._run, name="trackers", daemon=True)
        if names:
            self._thread.start()

    def log(self, row: Mapping[str, Any]) -> None:
        """The numbers of a row with its ``step``."""
        if not self._made:
            return
        values = {name: float(value) for name, value in row.items() if name != "step" and _is_number(value)}
        self._say(lambda: lambda tracker: tracker.log(int(row["step"]), values))

    def table(self, step: int, size: int, make: Callable[[], Table]) -> None:
        """What ``make`` gives, which holds ``size`` bytes and is called by the trackers' thread; once for each
        ``step``."""
        if not self._made or step <= self._shown or not self._hold(size):
            return
        self._shown = step

        def made() -> Callable[[Tracker], Any] | None:
            try:
                table = make()
            except Exception as error:  # the numbers go on
                log.warning("answers are not shown (run.tracker_samples)", step=step, error=str(error))
                return None
            finally:
                self._hold(-size)
            return (lambda tracker: tracker.table(*table)) if table.rows else None

        if not self._say(made):
            self._hold(-size)

    def close(self, error: str | None = None) -> None:
        """Sends what is left, and the ``error`` of a run that has failed, for at most `CLOSE_S`."""
        if self._made:
            self._error = error
            try:
                self._said.put(None, timeout=1)
            except queue.Full:
                return
            self._thread.join(CLOSE_S)

    def _hold(self, size: int) -> bool:
        """So many bytes more, or fewer. Whether there was room: for one table there always is."""
        with self._lock:
            if size > 0 and self._held and self._held + size > WAITING_BYTES:
                return False
            self._held += size
            return True

    def _say(self, what: Callable[[], Callable[[Tracker], Any] | None]) -> bool:
        """Whether there was room for it."""
        try:
            self._said.put_nowait(what)
        except queue.Full:
            return False
        return True

    def _run(self) -> None:
        made = {name: self._try(name, make) for name, make in self._made}
        there = {name: tracker for name, tracker in made.items() if isinstance(tracker, Tracker)}
        while (what := self._said.get()) is not None:
            if (say := what()) is None:
                continue
            for name, tracker in list(there.items()):
                if self._try(name, partial(say, tracker)) is GIVEN_UP:
                    del there[name]
        for name, tracker in there.items():
            self._try(name, partial(tracker.close, self._error))

    @staticmethod
    def _try(name: str, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except BaseException as error:  # some end the process where they have no key
            log.warning("a tracker is given up (run.trackers)", tracker=name, error=f"{type(error).__name__}: {error}")
            return GIVEN_UP


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
