"""Worker processes and the watch over them: a call that hangs or crashes costs its own item alone."""

from __future__ import annotations

import io
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import structlog

from penstock.services.reward.config import REGISTRY, FunctionConfig
from penstock.services.reward.worker import frame_size, read_frame, write_frame
from penstock.services.runtime.errors import SetupError

log = structlog.get_logger()

START_S = 120.0
BATCH = 64


class FunctionError(SetupError):
    """A reward function that cannot be loaded; says which and why."""


class WorkerGone(Exception):
    """The worker died or was ended in the middle of a batch."""


@dataclass(slots=True)
class Item:
    """One call: ``function`` is its index in the config."""

    function: int
    response: str
    truth: Any
    prompt: str
    future: Future[float]


class Worker:
    """One worker process."""

    def __init__(self, functions: Sequence[FunctionConfig]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "penstock.services.reward.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._in, self._out = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        self._received = bytearray()
        configs = [
            {"function": REGISTRY.get(f.function, f.function), "options": f.options, "timeout_s": f.timeout_s}
            for f in functions
        ]
        try:
            write_frame(self._in, configs)
            hello = self._read(START_S)
        except (WorkerGone, BrokenPipeError):
            self.kill()
            raise FunctionError("reward.functions: the worker did not start; its stderr says why") from None
        if "error" in hello:
            self.kill()
            names = ", ".join(f.function for f in functions)
            raise FunctionError(f"reward.functions: cannot load {names}: {hello['error']}")
        self.asynchronous: list[bool] = hello["asynchronous"]

    def run(self, function: int, items: Sequence[Item], timeout_s: float) -> None:
        """Runs ``items`` and sets their futures. Raises `WorkerGone`, with those unset that were not answered."""
        payload = [
            {"id": i, "response": item.response, "truth": item.truth, "prompt": item.prompt}
            for i, item in enumerate(items)
        ]
        # An async function keeps its own deadline; ours is only the last resort for one that blocks its loop.
        patience = timeout_s * 2 + 1 if self.asynchronous[function] else timeout_s
        try:
            write_frame(self._in, {"function": function, "items": payload})
        except BrokenPipeError:
            raise WorkerGone("crashed") from None
        for _ in items:
            reply = self._read(patience)
            future = items[reply["id"]].future
            if "reward" in reply:
                future.set_result(reply["reward"])
            else:
                future.set_exception(ValueError(reply["error"]))

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._process.wait()
        self._in.close()
        self._out.close()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """The next reply. Raises `WorkerGone` where there is none in time, or never will be."""
        deadline = time.monotonic() + timeout_s
        while (size := frame_size(self._received)) is None or len(self._received) < size:
            if not select.select([self._out], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise WorkerGone(f"timed out after {timeout_s:g} s")
            data = os.read(self._out.fileno(), 1 << 16)
            if not data:
                raise WorkerGone(f"crashed with exit code {self._process.wait()}")
            self._received += data
        frame = bytes(self._received[:size])
        del self._received[:size]
        return read_frame(io.BytesIO(frame))


class Pool:
    """Several workers that share a queue of items."""

    def __init__(self, functions: Sequence[FunctionConfig], workers: int) -> None:
        self._functions = functions
        self._queue: queue.SimpleQueue[list[Item] | None] = queue.SimpleQueue()
        self._workers = [Worker(functions) for _ in range(workers)]
        self.restarts = 0
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), name=f"worker-{index}", daemon=True)
            for index in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, items: Sequence[Item]) -> None:
        """Queues calls; their futures hold the reward, or what went wrong."""
        for function in range(len(self._functions)):
            mine = [item for item in items if item.function == function]
            for start in range(0, len(mine), BATCH):
                self._queue.put(mine[start : start + BATCH])

    def close(self) -> None:
        """Ends all workers."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(1)
        for worker in self._workers:
            worker.kill()

    def _serve(self, index: int) -> None:
        while (items := self._queue.get()) is not None:
            timeout_s = self._functions[items[0].function].timeout_s
            while items:
                try:
                    self._workers[index].run(items[0].function, items, timeout_s)
                    break
                except WorkerGone as gone:
                    left = [item for item in items if not item.future.done()]
                    together = len(items) > 1 and self._workers[index].asynchronous[items[0].function]
                    if together:  # any of them may have done it: each gets another try, alone
                        for item in left[1:]:
                            self._queue.put([item])
                        left = left[:1]
                    else:  # calls run in order, so the first without an answer is the one that did it
                        left.pop(0).future.set_exception(ValueError(str(gone)))
                    log.warning("reward worker ended", reason=str(gone), left=len(left))
                    items = left
                    self._workers[index].kill()
                    self._restart(index)

    def _restart(self, index: int) -> None:
        self.restarts += 1
        while True:
            try:
                self._workers[index] = Worker(self._functions)
                return
            except FunctionError as error:  # it loaded before: try until the process is stopped
                log.error("reward worker does not start", error=str(error))
                time.sleep(1)
