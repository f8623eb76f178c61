"""Plain functions of the user's, each call in a thread of its own."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from penstock.services.user_processes.child import BLOCKED

MOST_LEFT = 64
"""Threads of tools that hang, in one process."""
_LEFT: set[threading.Thread] = set()


async def in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """The result of a plain function, which has a thread of its own: one that hangs is in nobody's way. Where too many
    have been left behind, this process ends, and a new one begins without them."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        try:
            result, error = function(**arguments), None
        except BaseException as raised:
            result, error = None, raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
        _LEFT.discard(thread)
        loop.call_soon_threadsafe(settle, result, error)

    thread = threading.Thread(target=run, name="tool", daemon=True)
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:  # it took too long
        _LEFT.add(thread)
        if sum(each.is_alive() for each in _LEFT) > MOST_LEFT:
            os._exit(BLOCKED)
        raise


async def called(function: Callable[..., Any], arguments: Mapping[str, Any], here: bool = False) -> Any:
    """The result of an async function, or of a plain one: in a thread, or ``here``, where nothing else waits."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return function(**arguments) if here else await in_thread(function, arguments)


def at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of one that never waits. The user's code in it may so have an event loop of its own."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("it waits for something, and there is no event loop")
