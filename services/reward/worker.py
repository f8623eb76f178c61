"""A process that runs one reward function, so that one that hangs or crashes takes nothing else with it.

Speaks length-prefixed `protocols.wire.pack` buffers over what were its stdin and stdout: in, the function, then lists
of calls; out, one reply a call. An async function's calls all run in one event loop that lives as long as the process,
so that what a module keeps for itself (a semaphore, an HTTP client) works; a plain function's run one after the other.

`Mark` is a word of memory shared with the parent: the call whose code runs right now. So the parent knows whom a crash
or a hang belongs to, and runs the others again.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import mmap
import os
import struct
import sys
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, BinaryIO

from penstock.protocols.wire import pack, unpack
from penstock.services.runtime.plugins import blame, load_plugin
from penstock.services.runtime.processes import die_with_parent

_LENGTH = struct.Struct("<I")
_MARK = struct.Struct("<q")
FLOAT32_MAX = 3.4e38
NOBODY = -1
WATCH_S = 0.05
BLOCKED = 86
"""Exit code of a worker whose event loop was blocked for too long by one call."""

OFFERED = ("response", "response_tokens", "truth", "prompt", "messages", "finish_reason", "group", "sample", "step")
"""What a function may ask for by name, beside its options and the columns that its config names."""


def make_frame(value: Any) -> bytes:
    """One value as it is sent."""
    data = pack(value)
    return _LENGTH.pack(len(data)) + data


def write_frame(stream: BinaryIO, value: Any) -> None:
    """Sends one value."""
    stream.write(make_frame(value))
    stream.flush()


def frame_size(received: bytes | bytearray) -> int | None:
    """Bytes of the first frame in ``received``, its length included; None where not even that has arrived."""
    return _LENGTH.unpack(received[: _LENGTH.size])[0] + _LENGTH.size if len(received) >= _LENGTH.size else None


def read_frame(stream: BinaryIO) -> Any:
    """Receives one value; None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return unpack(stream.read(_LENGTH.unpack(head)[0]))


class Mark:
    """See the module's docstring. ``file`` is a descriptor of shared memory."""

    def __init__(self, file: int) -> None:
        self._map = mmap.mmap(file, mmap.PAGESIZE)

    def set(self, call: int) -> None:
        """``call`` runs now, or `NOBODY`."""
        _MARK.pack_into(self._map, 0, call)

    def read(self) -> int:
        """The call that runs, or ran when the process ended."""
        return _MARK.unpack_from(self._map, 0)[0]


class _Function:
    """The function with its options, its timeout and what it asks for."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.call: Callable[..., Any] = load_plugin(config["function"], f"{config['key']}.function")
        if not callable(self.call):
            raise ValueError(
                f"{config['key']}.function: {config['function']} is a {type(self.call).__name__}, which "
                "cannot be called"
            )
        self._where = f"{config['key']}: {config['function']}"
        self.is_async = inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(
            getattr(self.call, "__call__", None)  # noqa: B004 - an object whose __call__ is async
        )
        self.options, self.timeout_s = config["options"], config["timeout_s"]
        self.asks = self._asks([*OFFERED, *config["columns"]])

    def _asks(self, offered: list[str]) -> list[str]:
        """Of what is ``offered``, what the function takes. Raises `ValueError` where it wants something else."""
        parameters = inspect.signature(self.call).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return [name for name in offered if name not in self.options]
        names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        required = {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL}
        if strange := sorted(required - set(offered) - self.options.keys()):
            raise ValueError(
                f"{self._where} asks for {', '.join(strange)}; it may ask for {', '.join(offered)}, and for what its "
                "options give; with prompts.train.truth_key=null truth is the whole row, a map of its columns"
            )
        if strange := sorted(self.options.keys() - names):
            raise ValueError(f"{self._where} does not take {', '.join(strange)}, which its options give")
        return [name for name in offered if name in names and name not in self.options]

    def start(self, call: dict[str, Any]) -> Any:
        """The result, or what it comes from when awaited."""
        return self.call(**call["arguments"], **self.options)


def _reply(call: int, value: Any) -> dict[str, Any]:
    try:
        reward = float(value)
    except (TypeError, ValueError):
        return {"id": call, "error": f"returned {type(value).__name__}, not a number"}
    if not math.isfinite(reward) or abs(reward) > FLOAT32_MAX:
        return {"id": call, "error": f"returned {reward}"}
    return {"id": call, "reward": reward}


def _failure(call: int, error: BaseException) -> dict[str, Any]:
    return {"id": call, "error": f"raised {type(error).__name__}: {str(error)[:300]}{blame(error)}"}


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
        finally:
            mark.set(NOBODY)
            ran(time.monotonic() - began)
        sent = thrown = None
        try:
            sent = yield waited_for
        except BaseException as error:  # a cancellation, say: it is the coroutine's to handle
            thrown = error


class _Loop:
    """Runs an async function's calls, all at once."""

    def __init__(self, function: _Function, calls: BinaryIO, replies: BinaryIO, mark: Mark) -> None:
        self._function, self._calls, self._replies, self._mark = function, calls, replies, mark
        self._running: set[asyncio.Task[None]] = set()
        self._ran_s = 0.0
        """Seconds in which code of calls ran, so that no other call could go on."""

    async def run(self) -> None:
        """Until there are no more calls to read."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def read() -> None:
            while (calls := read_frame(self._calls)) is not None:
                loop.call_soon_threadsafe(self._begin, calls)
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, name="calls", daemon=True).start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        await ended.wait()

    def _begin(self, calls: list[dict[str, Any]]) -> None:
        for call in calls:
            task = asyncio.ensure_future(self._one(call))
            self._running.add(task)  # the loop itself keeps no task alive
            task.add_done_callback(self._running.discard)

    async def _one(self, call: dict[str, Any]) -> None:
        number, timeout_s = call["id"], self._function.timeout_s
        ran_s = self._ran_s
        try:
            value = await asyncio.wait_for(self._marked(call), timeout_s)
            reply = _reply(number, value)
        except TimeoutError:
            reply = {"id": number, "error": f"timed out after {timeout_s:g} s{self._held_up(ran_s)}"}
        except Exception as error:
            reply = _failure(number, error)
        write_frame(self._replies, reply)

    async def _marked(self, call: dict[str, Any]) -> Any:
        return await _marked(self._function.start(call), call["id"], self._mark, self._count)

    def _count(self, seconds: float) -> None:
        self._ran_s += seconds

    def _held_up(self, ran_s: float) -> str:
        """Why a call came late that was never its turn: since ``ran_s`` others held the loop."""
        if self._ran_s - ran_s < 0.5 * self._function.timeout_s:
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
            elif time.monotonic() - since > self._function.timeout_s:
                os._exit(BLOCKED)


def _run_plain(function: _Function, calls: BinaryIO, replies: BinaryIO, mark: Mark) -> None:
    while (batch := read_frame(calls)) is not None:
        for call in batch:
            mark.set(call["id"])
            try:
                reply = _reply(call["id"], function.start(call))
            except Exception as error:
                reply = _failure(call["id"], error)
            mark.set(NOBODY)
            write_frame(replies, reply)


def main() -> None:
    """Entry point of ``python -m penstock.services.reward.worker MARK``."""
    die_with_parent()
    mark = Mark(int(sys.argv[1]))
    # What a function prints must not mix with the replies, nor may its child processes read the calls: both get
    # descriptors that no child inherits.
    calls, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    config = read_frame(calls)
    try:
        function = _Function(config)
    except (Exception, SystemExit) as error:
        write_frame(replies, {"error": str(error)})
        return
    write_frame(replies, {"asynchronous": function.is_async, "asks": function.asks})
    if function.is_async:
        asyncio.run(_Loop(function, calls, replies, mark).run())
    else:
        _run_plain(function, calls, replies, mark)


if __name__ == "__main__":
    main()
