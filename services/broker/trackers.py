"""What a run tells trackers: numbers of steps and evaluations, and some of each step's answers.

A thread of its own says it all: whatever a tracker does, whom it waits for and how it fails, the broker does not wait.
A tracker that fails is tried again, ever more rarely, and told then what it has missed; the run's own files have
everything.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import structlog

from penstock.services.broker.own_tracker import OwnTracker
from penstock.services.broker.tracker_libraries import MAKERS, Columns, Rows

log = structlog.get_logger()

WAITING = 10_000
"""Rows that may wait for slow trackers; of more, those that come are left out."""
WAITING_BYTES = 64 << 20
"""Of experience, that tables are to be made of, likewise."""
FIRST_PAUSE_S, PAUSE_S = 10.0, 600.0
"""Until a tracker that fails is tried again: at first, and at most."""
ROW_TRIES = 2
"""A row that was not taken this often is left out, where the tracker takes the next one."""
POLL_S = 1.0
CLOSE_S = 20.0
"""What a tracker has to send the last of it."""


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
        self._said: queue.Queue[Callable[[], Callable[[_Told], Any] | None] | None] = queue.Queue(WAITING)
        self._held, self._lock = 0, threading.Lock()
        """Bytes that wait."""
        self._error: str | None = None
        self._shown = -1
        """The last step of which there was a table."""
        makers = {name: MAKERS.get(name, partial(OwnTracker, name)) for name in names}
        self._made = [_Told(name, partial(make, folder, project, config)) for name, make in makers.items()]
        self._thread = threading.Thread(target=self._run, name="trackers", daemon=True)
        if names:
            self._thread.start()

    @property
    def failing(self) -> dict[str, str]:
        """By tracker that fails now: why, and how much it has missed so far."""
        return {told.name: words for told in self._made if (words := told.words)}

    def log(self, row: Mapping[str, Any]) -> None:
        """The numbers of a row with its ``step``."""
        if not self._made:
            return
        values = {name: float(value) for name, value in row.items() if name != "step" and _is_number(value)}
        self._say(lambda: lambda told: told.log(int(row["step"]), values))

    def table(self, step: int, size: int, make: Callable[[], Table]) -> None:
        """What ``make`` gives, which holds ``size`` bytes and is called by the trackers' thread; once for each
        ``step``."""
        if not self._made or step <= self._shown or not self._hold(size):
            return
        self._shown = step

        def made() -> Callable[[_Told], Any] | None:
            try:
                table = make()
            except Exception as error:  # the numbers go on
                log.warning("answers are not shown (run.tracker_samples)", step=step, error=str(error))
                return None
            finally:
                self._hold(-size)
            return (lambda told: told.table(table)) if table.rows else None

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

    def _say(self, what: Callable[[], Callable[[_Told], Any] | None]) -> bool:
        """Whether there was room for it."""
        try:
            self._said.put_nowait(what)
        except queue.Full:
            return False
        return True

    def _run(self) -> None:
        for told in self._made:
            told.catch_up()
        while True:
            try:
                what = self._said.get(timeout=POLL_S if self.failing else None)
            except queue.Empty:
                for told in self._made:
                    told.catch_up()
                continue
            if what is None:
                break
            if (say := what()) is not None:
                for told in self._made:
                    say(told)
        for told in self._made:
            told.close(self._error)


class _Told:
    """One tracker, as the thread speaks to it: ``make`` makes it, also once more where it fails for long."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name, self._make = name, make
        self._tracker: Tracker | None = None
        self._waits: deque[tuple[int, Mapping[str, float]]] = deque()
        """Numbers that it has not taken yet, of steps in their order."""
        self._error, self._lost, self._tries, self._again_at = "", 0, 0, 0.0
        self._closing, self._row_tries = False, 0
        """How often it has not taken the first of them."""
        self._tables_fail = False

    @property
    def words(self) -> str:
        """Why it fails now; empty where it does not."""
        lost = f", and {self._lost} are lost" if self._lost else ""
        return f"{self._error}; {len(self._waits)} rows wait for it{lost}" if self._error else ""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """It is told these numbers, now or later."""
        if len(self._waits) >= WAITING:
            self._waits.popleft()
            self._lost += 1
        self._waits.append((step, values))
        self.catch_up()

    def table(self, table: Table) -> None:
        """It is told of answers, now or never: they hold experience."""
        if self._tracker and not self._error and (error := self._fails(partial(self._tracker.table, *table))):
            if not self._tables_fail:
                log.warning("a tracker takes no answers (run.tracker_samples)", tracker=self.name, error=error)
            self._tables_fail = True

    def catch_up(self, at_once: bool = False) -> None:
        """It is told what waits for it, unless it has failed just now."""
        now = time.monotonic()
        if self._error and now < self._again_at and not at_once:
            return
        error = self._say_all()
        if error:
            if not self._error:
                log.warning("a tracker fails, and is tried again (run.trackers)", tracker=self.name, error=error)
            self._again_at = now + min(PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._tries, 10))
            self._tries += 1
        elif self._error:
            log.info("a tracker works again", tracker=self.name, lost=self._lost)
            self._tries = 0
        self._error = error

    def close(self, error: str | None) -> None:
        """The run is over: it is tried once more, and no row waits for another try."""
        self._closing, self._row_tries = True, ROW_TRIES
        self.catch_up(at_once=True)
        if self._waits or self._lost:
            missing = len(self._waits) + self._lost
            log.warning("a tracker lacks rows, which metrics.jsonl has", tracker=self.name, rows=missing)
        if self._tracker:
            self._fails(partial(self._tracker.close, error))

    def _say_all(self) -> str:
        """Returns the error, if it fails."""
        if self._tracker and self._tries > 1 and self.name in MAKERS:  # its connection may be gone for good
            self._fails(partial(self._tracker.close, None))
            self._tracker = None
        if self._tracker is None and (error := self._fails(self._begin)):
            return error
        assert self._tracker
        while self._waits:
            error = self._fails(partial(self._tracker.log, *self._waits[0]))
            if error:
                self._row_tries += 1
                # Where it then takes the next one, it is this row alone that it does not take.
                if (
                    self._row_tries < ROW_TRIES
                    or len(self._waits) < 2
                    or self._fails(partial(self._tracker.log, *self._waits[1]))
                ):
                    return error
                log.warning("a tracker does not take a row", tracker=self.name, step=self._waits[0][0], error=error)
                self._waits.popleft()
                self._lost += 1
            self._waits.popleft()
            self._row_tries = ROW_TRIES if self._closing else 0
        return ""

    def _begin(self) -> None:
        self._tracker = self._make()

    @staticmethod
    def _fails(do: Callable[[], Any]) -> str:
        try:
            do()
        except BaseException as error:  # some end the process where they have no key
            return f"{type(error).__name__}: {error}"
        return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
