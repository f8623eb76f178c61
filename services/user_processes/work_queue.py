"""The calls of one program that wait for its worker, and those that it has.

    submit ──▶ waiting ──▶ in the worker ──▶ its future has the result, or what went wrong
                  ▲              │
                  └── run again ─┘  the worker died, and it was another call's doing

A call that hangs or crashes costs itself alone: the worker is started again, and every other call that it had runs
again.
"""

from __future__ import annotations

import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import structlog

from penstock.services.user_processes.frames import NOBODY
from penstock.services.user_processes.pace import Pace
from penstock.services.user_processes.worker import START_S, Call, Program, ProgramError, Worker, WorkerGone

log = structlog.get_logger()

AHEAD_S, MOST_AHEAD = 0.005, 64
"""A plain program's worker has calls ready for so long, by what they took so far: enough that it never waits for the
next one, and few enough that none waits behind a slow one while another worker is idle."""
GRACE_S = 2.0
"""An async program keeps its own deadlines; a worker whose call is that much past its own is wedged."""
MOST_DEATHS = 3
"""A call that was under way at so many deaths of a worker is given up, where nobody knows whose doing they were."""
LOOK_S, AGAIN_S = 0.1, 1.0
"""A worker that loads is looked at, and one that does not start is started again, so often."""


class WorkerQueue:
    """The calls of one program, in one worker; a pool of several shares what waits."""

    def __init__(
        self,
        program: Program,
        limit: int,
        waiting: queue.SimpleQueue[Call] | None = None,
        worker: Worker | None = None,
        pace: Pace | None = None,
        ahead: bool = True,
    ) -> None:
        """``waiting``: what waits, where that is shared; ``worker``: one that has begun to load the program;
        ``pace``: when calls may begin, likewise; ``ahead``: a plain program's worker has more than one."""
        self.program = program
        self._most_ahead = MOST_AHEAD if ahead else 1
        self.restarts = 0
        self._waiting = waiting or queue.SimpleQueue[Call]()
        self.pace = pace or Pace(program.per_minute)
        self._again: deque[Call] = deque()
        self._under_way: dict[int, Call] = {}
        """In the order in which they were sent."""
        self._next = 0
        self._closing = threading.Event()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._start_s = START_S
        self.worker = worker or Worker(program)
        self._most, self._limit = limit, 0
        self.ready = False
        """The worker has loaded its program."""
        self.fellows: Sequence[WorkerQueue] = (self,)
        """Those that take from what waits."""
        self._answered_at = self._call_s = 0.0
        """Of a plain function: when the last answer came, and what a call takes on average."""
        self._thread = threading.Thread(target=self._run, name=f"worker-{program.function}", daemon=True)

    def start(self) -> None:
        """Begins to work, once the worker has loaded its program."""
        self._thread.start()

    @property
    def shared(self) -> queue.SimpleQueue[Call]:
        """What waits, for another worker of the same program."""
        return self._waiting

    @property
    def under_way(self) -> int:
        """Calls that the worker has."""
        return len(self._under_way)

    def submit(self, call: Call, first: bool = False) -> None:
        """Queues a call, or puts it ``first``; its future has the result, or what went wrong."""
        if first:
            self._again.appendleft(call)
        else:
            self._waiting.put(call)
        self.wake()

    def wake(self) -> None:
        """There is something to do."""
        try:
            self._wake_write.send(b"\0")
        except OSError:
            pass  # awake already, or closed

    def close(self) -> None:
        """Ends the worker."""
        self._closing.set()
        self.wake()
        self._thread.join(2)
        self.worker.kill()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._load()
        while not self._closing.is_set():
            try:
                self._serve()
            except WorkerGone as gone:
                self._bury(str(gone))
            except Exception as error:  # nobody may wait for an answer that never comes
                log.exception("a worker's queue failed", function=self.program.function)
                self._bury(f"could not be called: {type(error).__name__}: {error}", everyone=True)

    def _load(self) -> None:
        """Until a worker has loaded the program. Where none can for `start_s`, of no fellow either, whoever waits is
        told so."""
        began, self.ready = time.monotonic(), False
        while not self._closing.is_set():
            try:
                if self.worker.ended:
                    self.worker = Worker(self.program, self._start_s)
                if self.worker.loaded(LOOK_S):
                    self._limit = self._most if self.worker.asynchronous else 1
                    self.ready = True
                    return
            except (ProgramError, OSError) as error:  # another one has loaded it before
                log.error("worker does not start", error=str(error))
                if any(each.ready for each in self.fellows):
                    self._leave_to_fellows()
                    began = time.monotonic()
                elif time.monotonic() - began >= self._start_s:
                    self._give_up(error)
                self._closing.wait(AGAIN_S)

    def _leave_to_fellows(self) -> None:
        while self._again:
            self._waiting.put(self._again.popleft())
        for each in self.fellows:
            each.wake()

    def _give_up(self, error: ProgramError | OSError) -> None:
        """Nothing that waits can be called; the next calls may be."""
        words = f"{error}; it was loaded before, but not in {self._start_s:g} s now: was it edited? then mend it"
        while call := self._take():
            call.future.set_exception(type(error)(words))

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.worker.replies, selectors.EVENT_READ, "replies")
            selector.register(self._wake_read, selectors.EVENT_READ, "wake")
            while not self._closing.is_set():
                self._send_waiting()
                for key, _ in selector.select(self._patience()):
                    if key.data == "wake":
                        self._wake_read.recv(4096)
                    else:
                        for answer in self.worker.read():
                            self._answered(answer)
                self._check_deadline()

    def _send_waiting(self) -> None:
        sending: dict[int, Call] = {}
        while len(self._under_way) < self._limit and (call := self._begun()):
            sending[self._next] = call
            if self.worker.asynchronous:
                call.deadline = time.monotonic() + self.program.timeout_s + GRACE_S
            elif len(self._under_way) == 1:
                self._answered_at = time.monotonic()
                call.deadline = self._answered_at + self.program.timeout_s
        if sending:
            self.worker.send(sending, next(iter(self._under_way.values())).deadline)

    def _begun(self) -> Call | None:
        """The next one, which is under way from now on; None where there is none, or none may begin yet."""
        with self.pace.beginning:
            call = self._take() if self._waits() and self.pace.begin() else None
            if call:
                self._next += 1
                self._under_way[self._next] = call
            return call

    def _waits(self) -> bool:
        return bool(self._again) or not self._waiting.empty()

    def _take(self) -> Call | None:
        if self._again:
            return self._again.popleft()
        try:
            return self._waiting.get_nowait()
        except queue.Empty:
            return None

    def _answered(self, answer: dict[str, Any]) -> None:
        call = self._under_way.pop(answer["id"], None)
        if call is None:  # answered twice, by a process that the call has forked
            return
        if "value" in answer:
            call.future.set_result(answer["value"])
        else:
            call.future.set_exception(ValueError(answer["error"]))
        if not self.worker.asynchronous:
            now = time.monotonic()
            self._call_s += 0.1 * (now - self._answered_at - self._call_s)
            self._answered_at = now
            self._limit = min(self._most_ahead, 1 + int(AHEAD_S / max(self._call_s, 1e-6)))
            for following in self._under_way.values():  # the next one runs by now
                following.deadline = now + self.program.timeout_s
                break

    def _patience(self) -> float | None:
        """Seconds until a call is late, or one that waits may begin; None where neither is to come. Calls are sent in
        the order of deadlines."""
        first = next(iter(self._under_way.values()), None)
        waits = [max(0.0, first.deadline - time.monotonic())] if first else []
        if len(self._under_way) < self._limit and self._waits() and not self.pace.held:  # also where it may by now
            waits.append(self.pace.wait_s())
        return min(waits, default=None)

    def _check_deadline(self) -> None:
        first = next(iter(self._under_way.values()), None)
        if first and time.monotonic() > first.deadline:
            raise WorkerGone(f"timed out after {self.program.timeout_s:g} s")

    def _bury(self, reason: str, everyone: bool = False) -> None:
        """The call that did it fails, or ``everyone``; the others run again, in a new worker."""
        running = self.worker.running
        self.worker.kill()
        if running not in self._under_way and not self.worker.asynchronous:
            running = next(iter(self._under_way), NOBODY)  # calls run in their order
        log.warning("worker ended", function=self.program.function, reason=reason, others=len(self._under_way))
        for number, call in self._under_way.items():
            call.deaths += 1
            late = self.worker.asynchronous and time.monotonic() > call.deadline
            if number == running or late or everyone:
                call.future.set_exception(ValueError(reason))
            elif running == NOBODY and call.deaths >= MOST_DEATHS:
                call.future.set_exception(ValueError(f"{reason}, as it did {call.deaths - 1} times before"))
            else:
                self._again.append(call)
        self._under_way.clear()
        self.restarts += 1
        self._load()
