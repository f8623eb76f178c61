"""The worker processes of a program whose calls know nothing of each other. Each program has a pool of its own, so a
slow one delays no other."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from penstock.services.user_processes.work_queue import WorkerQueue
from penstock.services.user_processes.worker import Call, Program, Worker


class WorkerPool:
    """The workers of one program: one where it is async, else so many ``workers``. Any of them answers any call."""

    def __init__(
        self, program: Program, workers: int, limit: int, worker: Worker | None = None, ahead: bool = True
    ) -> None:
        """Waits until the first worker, or the ``worker`` that has begun, has loaded the program; the others then load
        it while that works. ``ahead``: a plain program's workers have more calls ready than they run. Raises
        `ProgramError`."""
        self.program = program
        first = WorkerQueue(program, limit, worker=worker, ahead=ahead)
        self._pace = first.pace
        count = 1 if first.worker.asynchronous else workers
        self._queues = [
            first,
            *(WorkerQueue(program, limit, first.shared, pace=first.pace, ahead=ahead) for _ in range(count - 1)),
        ]
        self._open = 0
        self._lock = threading.Lock()
        for each in self._queues:
            each.fellows = self._queues
            each.start()

    @property
    def outstanding(self) -> int:
        """Calls that were submitted and have no answer yet."""
        return self._open

    @property
    def under_way(self) -> int:
        """Calls that workers have; of a plain program's one a worker runs, the others are next."""
        return sum(each.under_way for each in self._queues)

    @property
    def restarts(self) -> int:
        """How often a worker had to be started again."""
        return sum(each.restarts for each in self._queues)

    def submit(self, call: Call) -> Future[Any]:
        """Queues a call for whichever worker is free first."""
        with self._lock:
            self._open += 1
        call.future.add_done_callback(self._closed)
        self._queues[0].submit(call)
        for each in self._queues[1:]:
            if not each.under_way:
                each.wake()
        return call.future

    def hold(self) -> None:
        """No call begins from now on; `under_way` has those that have begun."""
        with self._pace.beginning:
            self._pace.held = True

    def go(self) -> None:
        """Calls begin again."""
        self._pace.held = False
        for each in self._queues:
            each.wake()

    def close(self) -> None:
        """Ends all workers."""
        for each in self._queues:
            each.close()

    def _closed(self, _future: Future[Any]) -> None:
        with self._lock:
            self._open -= 1
