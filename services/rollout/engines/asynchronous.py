"""What engines share that answer by coroutines: a thread with an event loop, and the requests that are open in it."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.services.rollout.engines.base import (
    BLIND,
    Completion,
    EngineError,
    Refusal,
    Request,
    RequestError,
    refuse_unfit,
)
from penstock.services.rollout.engines.torch.sampling import stream_key
from penstock.services.runtime import health
from penstock.services.runtime.errors import LibraryError, SetupError

T = TypeVar("T")

WAIT_S = 0.01
"""How long `step` waits for something to finish."""
POLL_S = 0.5
CLOSE_S = 5.0
LOAD_BYTES_S = 2e8
"""A version may take as long to be loaded as its bytes do at this rate, where that is longer than the deadline: it may
be read from a disk."""


@dataclass(slots=True, eq=False)
class _Open:
    """A request of which not all continuations are done."""

    left: int
    tasks: list[Future[None]] = field(default_factory=list)


def load_within_s(nbytes: float, deadline_s: float) -> float:
    """Seconds that a version of ``nbytes`` may take to be loaded."""
    return max(deadline_s, nbytes / LOAD_BYTES_S)


class AsyncEngine(ABC):
    """The half of `base.Engine` that submits, waits and aborts. What is made of it says how one continuation is
    generated (`generate`), and sets ``version``. ``seats``: continuations that it is given at once."""

    blind = BLIND
    """Why requests may show no pictures; empty: they may."""

    def __init__(self, name: str, vocabulary: int, max_length: int, seats: int) -> None:
        self.version, self.ended = -1, False
        self._name, self._vocabulary, self._max_length = name, vocabulary, max_length
        self._open: dict[int, _Open] = {}
        self._early: list[Request] = []
        """Submitted before there were weights."""
        self._finished: queue.SimpleQueue[tuple[_Open, Completion | Refusal]] = queue.SimpleQueue()
        self._failure: str | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        # What is beyond the engine's seats waits here: then it is sent with the newest version, and a score goes ahead.
        self._seats = asyncio.Semaphore(seats)

    @abstractmethod
    async def generate(self, request: Request, sample: int, seed: int) -> Completion:
        """One continuation. Runs in the loop's thread, and is cancelled where the request is aborted. Whatever it
        raises counts as the engine's failure, but for `RequestError`, which costs the request alone."""

    def who(self) -> str:
        """Which part of the engine does not work, for errors; empty where nothing is known."""
        return ""

    def submit(self, request: Request) -> None:
        """See `base.Engine.submit`."""
        refuse_unfit(request, self._vocabulary, self._max_length, self.blind)
        if self.version < 0:
            self._early.append(request)
        else:
            self._send(request)

    def step(self) -> list[Completion | Refusal]:
        """See `base.Engine.step`."""
        self.check()
        done: list[Completion | Refusal] = []
        try:
            entry = self._finished.get(timeout=WAIT_S)
            while True:
                opened, result = entry
                opened.left -= 1
                # Otherwise it was aborted, and perhaps submitted again since.
                if self._open.get(result.number) is opened:
                    done.append(result)
                    if isinstance(result, Refusal):
                        self.abort(result.number)
                    elif opened.left == 0:
                        del self._open[result.number]
                entry = self._finished.get_nowait()
        except queue.Empty:
            return done

    def abort(self, number: int) -> None:
        """See `base.Engine.abort`."""
        self._early = [request for request in self._early if request.number != number]
        opened = self._open.pop(number, None)
        for task in opened.tasks if opened else ():
            task.cancel()

    def pending(self) -> int:
        """See `base.Engine.pending`."""
        return sum(opened.left for opened in self._open.values()) + self.early

    @property
    def early(self) -> int:
        """Continuations that wait for the first weights."""
        return sum(request.sampling.n for request in self._early)

    def serve(self, version: int) -> None:
        """From now on requests are sampled with ``version``; those that waited for it are sent."""
        self.version = version
        early, self._early = self._early, []
        for request in early:
            self._send(request)

    def call(self, coroutine: Coroutine[Any, Any, T], deadline_s: float, what: str) -> T:
        """Runs it in the loop's thread. Raises `EngineError` where it fails or takes too long."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        deadline = time.monotonic() + deadline_s
        try:
            while not future.done() and time.monotonic() < deadline:
                wait([future], POLL_S)
                health.beat()
                self.check()  # a dead engine may leave a call without an answer
            return future.result(0)
        except TimeoutError:
            raise EngineError(f"{self._name} did not {what} within {deadline_s:g} s{self.who()}") from None
        except (EngineError, SetupError, LibraryError):
            raise
        except Exception as error:
            raise EngineError(f"{self._name} could not {what}{self.who()}: {type(error).__name__}: {error}") from error
        finally:
            future.cancel()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Starts it in the loop's thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def fail(self, why: str) -> None:
        """The engine is of no use any more; the first reason is kept."""
        if self._failure is None:
            self._failure = f"{self._name} failed{self.who()}: {why}"

    def check(self) -> None:
        """Raises `EngineError` where the engine has failed."""
        if self._failure:
            raise EngineError(self._failure)

    def end(self) -> None:
        """Ends the thread."""
        self.ended = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    def _send(self, request: Request) -> None:
        opened = self._open[request.number] = _Open(request.sampling.n)
        for sample in range(request.sampling.n):
            seed = int(stream_key(request.seed, request.stream, sample)) & (2**63 - 1)
            opened.tasks.append(self.spawn(self._run(opened, request, sample, seed)))

    async def _run(self, opened: _Open, request: Request, sample: int, seed: int) -> None:
        try:
            async with self._seats:
                result = await self.generate(request, sample, seed)
            self._finished.put((opened, result))
        except RequestError as error:
            self._finished.put((opened, Refusal(request.number, str(error))))
        except Exception as error:  # a dead engine, or one that has refused what we had checked
            self.fail(f"group {request.number}, sample {sample}: {type(error).__name__}: {error}")
