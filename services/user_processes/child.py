"""A process that runs what the user wrote: calls in, one answer a call.

Speaks `frames` over what were its stdin and stdout: in, the program, then lists of calls; out, the answers. The calls
of an async program all run in one event loop that lives as long as the process, so that what a module keeps for itself
(a semaphore, an HTTP client) works; a plain program's run one after the other.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, BinaryIO, Protocol

from penstock.services.runtime.plugins import blame, load_plugin
from penstock.services.runtime.processes import die_with_parent
from penstock.services.user_processes.frames import NOBODY, Mark, read_frame, write_frame

WATCH_S = 0.05
BLOCKED = 86
"""Exit code of a process whose event loop was blocked for too long by one call."""
ITSELF = os.getpid()
"""Not that of a process which a call has forked: its parent answers."""


class Handler(Protocol):
    """What a program's calls are answered by. It is made from what the parent says of the program."""

    is_async: bool
    timeout_s: float
    asks: list[str]
    """Of what a call is offered, what it wants."""

    def start(self, arguments: dict[str, Any]) -> Any:
        """The result of a call, or what it comes from when awaited."""

    def answer(self, value: Any) -> dict[str, Any]:
        """``{"value": …}`` for a result, or ``{"error": …}`` where it is none."""


def _failure(call: int, error: BaseException) -> dict[str, Any]:
    try:
        message = str(error)[:300]
    except BaseException:  # its __str__ is the user's own code too
        message = "its message cannot be formatted"
    words = f"raised {type(error).__name__}: {message}{blame(error)}"
    return {"id": call, "error": words.encode("utf-8", "backslashreplace").decode()}


def _say(replies: BinaryIO, reply: dict[str, Any]) -> None:
    """Answers a call. What cannot be said (half of a surrogate pair in a text, say) is that call's failure."""
    if os.getpid() != ITSELF:
        os._exit(0)
    try:
        write_frame(replies, reply)
    except (ValueError, TypeError) as error:
        write_frame(replies, _failure(reply["id"], error))


def _exit_code(error: BaseException) -> int:
    """Of a process that ``error`` ends, as Python has it."""
    code = error.code if isinstance(error, SystemExit) else 1
    return code if isinstance(code, int) else int(code is not None)


def _read_in_thread(calls: BinaryIO, heard: Callable[[list[dict[str, Any]] | None], object]) -> None:
    """``heard`` is told of each list of calls, in a thread; None: there are no more."""

    def read() -> None:
        while (batch := read_frame(calls)) is not None:
            heard(batch)
        heard(None)

    threading.Thread(target=read, name="calls", daemon=True).start()


@types.coroutine
def _marked(
    coroutine: Coroutine[Any, Any, Any], call: int, mark: Mark, ran: Callable[[float], None]
) -> Generator[Any, Any, Any]:
    """Awaits ``coroutine``; while its own code runs, ``mark`` says so. ``ran`` is told for how many seconds it did."""
    sent: Any = None
    thrown: BaseException | None = None
    while True:
        mark.set(call)
        began = time.monotonic()
        try:
            waited_for = coroutine.send(sent) if thrown is None else coroutine.throw(thrown)
        except StopIteration as done:
            return done.value
        except (SystemExit, KeyboardInterrupt) as error:  # would end the loop, and every other call with it
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            mark.set(NOBODY)
            ran(time.monotonic() - began)
        sent = thrown = None
        try:
            sent = yield waited_for
        except BaseException as error:  # a cancellation, say: it is the coroutine's to handle
            thrown = error


class _Loop:
    """Runs an async program's calls, all at once."""

    def __init__(self, handler: Handler, calls: BinaryIO, replies: BinaryIO, mark: Mark) -> None:
        self._handler, self._calls, self._replies, self._mark = handler, calls, replies, mark
        self._running: set[asyncio.Task[None]] = set()
        self._ran_s = 0.0
        """Seconds in which code of calls ran, so that no other call could go on."""
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Until there are no more calls to read."""
        loop = asyncio.get_running_loop()

        def heard(calls: list[dict[str, Any]] | None) -> None:
            loop.call_soon_threadsafe(self._ended.set if calls is None else partial(self._begin, calls))

        _read_in_thread(self._calls, heard)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        await self._ended.wait()

    def _begin(self, calls: list[dict[str, Any]]) -> None:
        for call in calls:
            task = asyncio.ensure_future(self._one(call))
            self._running.add(task)  # the loop itself keeps no task alive
            task.add_done_callback(self._running.discard)

    async def _one(self, call: dict[str, Any]) -> None:
        number, timeout_s = call["id"], self._handler.timeout_s
        ran_s = self._ran_s
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                value = await self._marked(call)
            reply = {"id": number} | self._handler.answer(value)
        except TimeoutError as error:
            late = {"id": number, "error": f"timed out after {timeout_s:g} s{self._held_up(ran_s)}"}
            reply = late if limit.expired() else _failure(number, error)
        except BaseException as error:  # a cancellation, say, or a panic of another language's
            if self._ended.is_set():
                raise
            reply = _failure(number, error)
        _say(self._replies, reply)

    async def _marked(self, call: dict[str, Any]) -> Any:
        return await _marked(self._handler.start(call["arguments"]), call["id"], self._mark, self._count)

    def _count(self, seconds: float) -> None:
        self._ran_s += seconds

    def _held_up(self, ran_s: float) -> str:
        """Why a call came late that was never its turn: since ``ran_s`` others held the loop."""
        if self._ran_s - ran_s < 0.5 * self._handler.timeout_s:
            return ""
        return (
            "; its event loop was held up by code that does not await (time.sleep, requests, …): await there, or make "
            "it a plain function"
        )

    def _watch(self) -> None:
        """A call that blocks the loop for longer than its timeout ends this process: the mark says which it was."""
        blocked, since = NOBODY, time.monotonic()
        while True:
            time.sleep(WATCH_S)
            now = self._mark.read()
            if now != blocked or now == NOBODY:
                blocked, since = now, time.monotonic()
            elif time.monotonic() - since > self._handler.timeout_s:
                os._exit(BLOCKED)


def _run_plain(handler: Handler, calls: BinaryIO, replies: BinaryIO, mark: Mark) -> None:
    """One call after the other. They are read in a thread: a parent that cannot say its calls, because nobody reads
    them, would read no answers either."""
    waiting: queue.SimpleQueue[list[dict[str, Any]] | None] = queue.SimpleQueue()
    _read_in_thread(calls, waiting.put)
    while (batch := waiting.get()) is not None:
        for call in batch:
            mark.set(call["id"])
            try:
                reply = {"id": call["id"]} | handler.answer(handler.start(call["arguments"]))
            except BaseException as error:
                if os.getpid() != ITSELF:
                    os._exit(_exit_code(error))
                reply = _failure(call["id"], error)
            mark.set(NOBODY)
            _say(replies, reply)


def main() -> None:
    """Entry point of ``python -m penstock.services.user_processes.child MARK``."""
    die_with_parent()
    mark = Mark(int(sys.argv[1]))
    # What it prints must not mix with the replies, nor may its child processes read the calls: both get
    # descriptors that no child inherits.
    calls, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    program = read_frame(calls)
    try:
        handler: Handler = load_plugin(program["handler"], "handler")(program)
    except (Exception, SystemExit) as error:
        write_frame(replies, {"error": str(error), "passing": isinstance(error, ConnectionError)})
        return
    write_frame(replies, {"asynchronous": handler.is_async, "asks": handler.asks})
    if handler.is_async:
        asyncio.run(_Loop(handler, calls, replies, mark).run())
    else:
        _run_plain(handler, calls, replies, mark)


if __name__ == "__main__":
    main()
