"""The worker processes of a reward function, with the calls that wait for them.

    submit ──▶ waiting ──▶ in the worker ──▶ its future has the reward, or what went wrong
                  ▲              │
                  └── run again ─┘  the worker died, and it was another call's doing

Each function has a pool of its own, so a slow one delays no other. A call that hangs or crashes costs itself alone: the
worker is started again, and every other call that it had runs again.
"""

from __future__ import annotations

import io
import os
import queue
import select
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

import structlog

from penstock.services.reward.config import REGISTRY, FunctionConfig
from penstock.services.reward.worker import BLOCKED, NOBODY, Mark, frame_size, make_frame, read_frame, write_frame
from penstock.services.runtime.errors import SetupError

log = structlog.get_logger()

START_S = 120.0
AHEAD_S, MOST_AHEAD = 0.005, 64
"""A plain function's worker has calls ready for so long, by what they took so far: enough that it never waits for the
next one, and few enough that none waits behind a slow one while another worker is idle."""
GRACE_S = 2.0
"""An async function keeps its own deadlines; a worker whose call is that much past its own is wedged."""
MOST_DEATHS = 3
"""A call that was under way at so many deaths of a worker is given up, where nobody knows whose doing they were."""


class FunctionError(SetupError):
    """A reward function that cannot be loaded; says which and why."""


class WorkerGone(Exception):
    """The worker died, or had to be ended."""


@dataclass(slots=True)
class Call:
    """One call: what the function may be given, by name."""

    offered: dict[str, Any]
    future: Future[float] = field(default_factory=Future)
    deadline: float = 0.0
    """On the monotonic clock, once it is under way."""
    deaths: int = 0


class Worker:
    """One worker process, its pipes, and the mark that says which call runs."""

    def __init__(self, config: FunctionConfig, key: str, start_s: float = START_S) -> None:
        self._config = config
        memory = os.memfd_create("penstock-mark") if hasattr(os, "memfd_create") else _temporary_file()
        os.ftruncate(memory, os.sysconf("SC_PAGESIZE"))
        self._mark = Mark(memory)
        self._mark.set(NOBODY)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "penstock.services.reward.worker", str(memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=(memory,),
            )
        finally:
            os.close(memory)
        self._calls, self.replies = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        self._received = bytearray()
        function = REGISTRY.get(config.function, config.function)
        said = {"function": function, "key": key, "options": config.options, "timeout_s": config.timeout_s}
        try:
            write_frame(self._calls, said | {"columns": [name.replace("/", "_") for name in config.columns]})
            hello = self._hello(start_s)
        except (WorkerGone, BrokenPipeError):
            died = self._process.poll() is not None
            self.kill()
            why = "ended while it was imported" if died else f"was not imported within {start_s:g} s"
            raise FunctionError(f"{key}.function: {config.function} {why}; stderr may say more") from None
        if "error" in hello:
            self.kill()
            raise FunctionError(hello["error"])
        os.set_blocking(self._calls.fileno(), False)  # a worker that hangs must not hang this process
        self.asynchronous: bool = hello["asynchronous"]
        self._asks: list[str] = hello["asks"]

    def send(self, calls: dict[int, Call], deadline: float) -> None:
        """Begins calls. Raises `WorkerGone`, also where the worker, whose pipe is full, reads nothing until
        ``deadline`` (on the monotonic clock)."""
        said = [
            {"id": number, "arguments": {name: call.offered[name] for name in self._asks}}
            for number, call in calls.items()
        ]
        left = memoryview(make_frame(said))
        while left:
            try:
                left = left[os.write(self._calls.fileno(), left) :]
            except BlockingIOError:
                if not select.select([], [self._calls], [], max(0.0, deadline - time.monotonic()))[1]:
                    raise WorkerGone(f"timed out after {self._config.timeout_s:g} s") from None
            except BrokenPipeError:
                raise WorkerGone(self._epitaph()) from None

    def read(self) -> list[dict[str, Any]]:
        """What has been answered; blocks where nothing has. Raises `WorkerGone` where nothing will be."""
        data = os.read(self.replies.fileno(), 1 << 16)
        if not data:
            raise WorkerGone(self._epitaph())
        self._received += data
        answers = []
        while (size := frame_size(self._received)) is not None and len(self._received) >= size:
            answers.append(read_frame(io.BytesIO(bytes(self._received[:size]))))
            del self._received[:size]
        return answers

    @property
    def running(self) -> int:
        """The call whose code runs, or ran when the process ended; `NOBODY` where that is not known."""
        return self._mark.read()

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._process.wait()
        self._calls.close()
        self.replies.close()

    def _hello(self, start_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + start_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.replies, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                if answers := self.read():
                    return answers[0]
        raise WorkerGone("it did not start in time")

    def _epitaph(self) -> str:
        code = self._process.wait()
        if code == BLOCKED:
            return f"blocked the event loop for {self._config.timeout_s:g} s"
        return f"crashed with exit code {code}"


class WorkerQueue:
    """The calls of one function, in one worker; a pool of several shares what waits."""

    def __init__(
        self,
        config: FunctionConfig,
        key: str,
        limit: int,
        waiting: queue.SimpleQueue[Call] | None = None,
        start_s: float = START_S,
    ) -> None:
        self.config, self._key = config, key
        self.restarts = 0
        self._waiting = waiting or queue.SimpleQueue[Call]()
        self._again: deque[Call] = deque()
        self._under_way: dict[int, Call] = {}
        """In the order in which they were sent."""
        self._next = 0
        self._closing = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self.worker = Worker(config, key, start_s)
        self._limit = limit if self.worker.asynchronous else 2
        self._answered_at = self._call_s = 0.0
        """Of a plain function: when the last answer came, and what a call takes on average."""
        self._thread = threading.Thread(target=self._run, name=f"worker-{config.column}", daemon=True)

    def start(self) -> None:
        """Begins to work."""
        self._thread.start()

    @property
    def shared(self) -> queue.SimpleQueue[Call]:
        """What waits, for another worker of the same function."""
        return self._waiting

    @property
    def under_way(self) -> int:
        """Calls that the worker has."""
        return len(self._under_way)

    def submit(self, call: Call) -> None:
        """Queues a call; its future has the reward, or what went wrong."""
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
        self._closing = True
        self.wake()
        self._thread.join(2)
        self.worker.kill()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                self._serve()
            except WorkerGone as gone:
                self._bury(str(gone))

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.worker.replies, selectors.EVENT_READ, "replies")
            selector.register(self._wake_read, selectors.EVENT_READ, "wake")
            while not self._closing:
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
        while len(self._under_way) < self._limit and (call := self._take()):
            self._next += 1
            self._under_way[self._next] = sending[self._next] = call
            if self.worker.asynchronous:
                call.deadline = time.monotonic() + self.config.timeout_s + GRACE_S
            elif len(self._under_way) == 1:
                self._answered_at = time.monotonic()
                call.deadline = self._answered_at + self.config.timeout_s
        if sending:
            self.worker.send(sending, next(iter(self._under_way.values())).deadline)

    def _take(self) -> Call | None:
        if self._again:
            return self._again.popleft()
        try:
            return self._waiting.get_nowait()
        except queue.Empty:
            return None

    def _answered(self, answer: dict[str, Any]) -> None:
        call = self._under_way.pop(answer["id"])
        if "reward" in answer:
            call.future.set_result(answer["reward"])
        else:
            call.future.set_exception(ValueError(answer["error"]))
        if not self.worker.asynchronous:
            now = time.monotonic()
            self._call_s += 0.1 * (now - self._answered_at - self._call_s)
            self._answered_at = now
            self._limit = max(2, min(MOST_AHEAD, int(AHEAD_S / max(self._call_s, 1e-6))))
            for following in self._under_way.values():  # the next one runs by now
                following.deadline = now + self.config.timeout_s
                break

    def _patience(self) -> float | None:
        """Seconds until a call is late; None where none is under way. Calls are sent in the order of deadlines."""
        first = next(iter(self._under_way.values()), None)
        return max(0.0, first.deadline - time.monotonic()) if first else None

    def _check_deadline(self) -> None:
        first = next(iter(self._under_way.values()), None)
        if first and time.monotonic() > first.deadline:
            raise WorkerGone(f"timed out after {self.config.timeout_s:g} s")

    def _bury(self, reason: str) -> None:
        """The call that did it fails; the others run again, in a new worker."""
        running = self.worker.running
        self.worker.kill()
        if running not in self._under_way and not self.worker.asynchronous:
            running = next(iter(self._under_way), NOBODY)  # calls run in their order
        log.warning("reward worker ended", function=self.config.function, reason=reason, others=len(self._under_way))
        for number, call in self._under_way.items():
            call.deaths += 1
            late = self.worker.asynchronous and time.monotonic() > call.deadline
            if number == running or late:
                call.future.set_exception(ValueError(reason))
            elif running == NOBODY and call.deaths >= MOST_DEATHS:
                call.future.set_exception(ValueError(f"{reason}, as it did {call.deaths - 1} times before"))
            else:
                self._again.append(call)
        self._under_way.clear()
        self.restarts += 1
        while not self._closing:
            try:
                self.worker = Worker(self.config, self._key)
                return
            except FunctionError as error:  # it loaded before: try until the process is stopped
                log.error("reward worker does not start", error=str(error))
                time.sleep(1)


class WorkerPool:
    """The workers of one function, which stands at ``key`` of the config: one where it is async, else so many
    ``workers``."""

    def __init__(
        self,
        config: FunctionConfig,
        workers: int,
        limit: int,
        key: str = "reward.functions",
        start_s: float = START_S,
    ) -> None:
        self.config = config
        first = WorkerQueue(config, key, limit, start_s=start_s)
        count = 1 if first.worker.asynchronous else workers
        self._queues = [first, *(WorkerQueue(config, key, limit, first.shared) for _ in range(count - 1))]
        self._open = 0
        self._lock = threading.Lock()
        for each in self._queues:
            each.start()

    @property
    def outstanding(self) -> int:
        """Calls that were submitted and have no answer yet."""
        return self._open

    @property
    def under_way(self) -> int:
        """Calls that workers have; of a plain function's one a worker runs, the others are next."""
        return sum(each.under_way for each in self._queues)

    @property
    def restarts(self) -> int:
        """How often a worker had to be started again."""
        return sum(each.restarts for each in self._queues)

    def submit(self, call: Call) -> Future[float]:
        """Queues a call for whichever worker is free first."""
        with self._lock:
            self._open += 1
        call.future.add_done_callback(self._closed)
        self._queues[0].submit(call)
        for each in self._queues[1:]:
            if not each.under_way:
                each.wake()
        return call.future

    def close(self) -> None:
        """Ends all workers."""
        for each in self._queues:
            each.close()

    def _closed(self, _future: Future[float]) -> None:
        with self._lock:
            self._open -= 1


def _temporary_file() -> int:
    import tempfile

    file, name = tempfile.mkstemp()
    os.unlink(name)  # noqa: PTH108
    return os.dup(file)
