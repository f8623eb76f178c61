"""A process that runs reward functions, so that one that hangs or crashes takes nothing else with it.

Speaks length-prefixed `protocols.wire.pack` buffers over stdin and stdout: in, the functions, then batches of items;
out, one reply an item. Ends when stdin closes.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from penstock.protocols.wire import pack, unpack

_LENGTH = struct.Struct("<I")
FLOAT32_MAX = 3.4e38


def write_frame(stream: BinaryIO, value: Any) -> None:
    """Sends one value."""
    data = pack(value)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def frame_size(received: bytes | bytearray) -> int | None:
    """Bytes of the first frame in ``received``, its length included; None where not even that has arrived."""
    return _LENGTH.unpack(received[: _LENGTH.size])[0] + _LENGTH.size if len(received) >= _LENGTH.size else None


def read_frame(stream: BinaryIO) -> Any:
    """Receives one value; None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    data = stream.read(_LENGTH.unpack(head)[0])
    return unpack(data)


class _Function:
    """One function with its options and its timeout."""

    def __init__(self, config: dict[str, Any]) -> None:
        module, _, name = config["function"].partition(":")
        self.call: Callable[..., Any] = getattr(import_module(module), name)
        self.is_async = inspect.iscoroutinefunction(self.call)
        self.options, self.timeout_s = config["options"], config["timeout_s"]

    def arguments(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"response": item["response"], "truth": item["truth"], "prompt": item["prompt"], **self.options}


def _reply(item: dict[str, Any], value: Any) -> dict[str, Any]:
    try:
        reward = float(value)
    except (TypeError, ValueError):
        return {"id": item["id"], "error": f"returned {type(value).__name__}, not a number"}
    if not math.isfinite(reward) or abs(reward) > FLOAT32_MAX:
        return {"id": item["id"], "error": f"returned {reward}"}
    return {"id": item["id"], "reward": reward}


def _failure(item: dict[str, Any], error: BaseException) -> dict[str, Any]:
    return {"id": item["id"], "error": f"raised {type(error).__name__}: {str(error)[:300]}"}


async def _run_async(function: _Function, items: list[dict[str, Any]], out: BinaryIO) -> None:
    async def one(item: dict[str, Any]) -> None:
        try:
            value = await asyncio.wait_for(function.call(**function.arguments(item)), function.timeout_s)
            write_frame(out, _reply(item, value))
        except TimeoutError:
            write_frame(out, {"id": item["id"], "error": f"timed out after {function.timeout_s:g} s"})
        except Exception as error:
            write_frame(out, _failure(item, error))

    await asyncio.gather(*(one(item) for item in items))


def _run(function: _Function, items: list[dict[str, Any]], out: BinaryIO) -> None:
    if function.is_async:
        asyncio.run(_run_async(function, items, out))
        return
    for item in items:
        try:
            write_frame(out, _reply(item, function.call(**function.arguments(item))))
        except Exception as error:
            write_frame(out, _failure(item, error))


def _leave_with_parent(parent: int) -> None:
    """Ends this process when its parent is gone, also while a function hangs and nobody reads stdin."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    """Entry point of ``python -m penstock.services.reward.worker``."""
    # What a function prints must not mix with the replies: they get a descriptor of their own.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path.append(str(Path.cwd()))
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    configs = read_frame(sys.stdin.buffer)
    try:
        functions = [_Function(config) for config in configs]
    except Exception as error:
        write_frame(out, {"error": f"{type(error).__name__}: {error}"})
        return
    write_frame(out, {"asynchronous": [function.is_async for function in functions]})
    while (batch := read_frame(sys.stdin.buffer)) is not None:
        _run(functions[batch["function"]], batch["items"], out)


if __name__ == "__main__":
    main()
