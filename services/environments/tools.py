"""The environment ``tools``: functions that the policy may call before it answers."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import threading
from collections.abc import Callable
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticUserError

from penstock.protocols.turn import Turn
from penstock.services.runtime.plugins import load_plugin
from penstock.services.turns.tool_calls import between_tags
from penstock.services.user_processes.child import BLOCKED

MOST_LEFT = 64
"""Threads of tools that hang, in one process."""
_LEFT: set[threading.Thread] = set()
LONGEST = 8_000
"""Characters of a result that the policy reads."""


class Tools:
    """Turns with calls are answered by their results, each a message of the role ``tool``; the first turn without one
    is the answer, and ends the task. It gives no reward: reward functions judge the last turn (``turns[-1]``).

    ``functions``: plain or async functions of yours, ``module:function``. Their type hints and docstrings are what the
    policy is told, by the tokenizer's chat template.
    """

    def __init__(self, functions: list[str]) -> None:
        loaded = [load_plugin(name, "rollout.environment.options.functions") for name in functions]
        self.tools = [_schema(function) for function in loaded]
        called: dict[str, str] = {}
        for schema, written in zip(self.tools, functions, strict=True):
            name = schema["function"]["name"]
            if name in called:
                raise ValueError(
                    f"functions: {called[name]} and {written} are both called {name!r}, and the policy could not say "
                    "which it means; rename one"
                )
            called[name] = written
        self._functions = {
            schema["function"]["name"]: validate_call(function)
            for schema, function in zip(self.tools, loaded, strict=True)
        }

    async def step(self, answer: str) -> Turn:
        """See docs/environments.md."""
        _, calls = between_tags(answer)
        if not calls:
            return Turn(done=True)
        results = await asyncio.gather(*map(self._run, calls))
        read = (result[:LONGEST].encode("utf-8", "replace").decode() for result in results)  # half of a pair, say
        return Turn([{"role": "tool", "content": result} for result in read])

    async def _run(self, text: str) -> str:
        """What the policy reads of one call; where it was wrong, what was."""
        try:
            call = json.loads(text)
            name, arguments = call["name"], call.get("arguments") or {}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return 'error: a call is JSON, {"name": …, "arguments": {…}}'
        function = self._functions.get(name) if isinstance(name, str) else None
        if function is None:
            return f"error: there is no function {name!r}; there are {', '.join(self._functions)}"
        if not isinstance(arguments, dict):
            return f'error: {name}: arguments must be an object of names and values, like {{"name": 1}}'
        try:
            if inspect.iscoroutinefunction(function):
                result = await function(**arguments)
            else:
                result = await _in_thread(function, arguments)
            return result if isinstance(result, str) else json.dumps(result, default=str)
        except ValidationError as error:
            return f"error: {name}: {'; '.join(_wrong(part) for part in error.errors())}"
        except Exception as error:  # the user's own code; the policy may do better next time
            return f"error: {name} raised {type(error).__name__}: {error}"


async def _in_thread(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
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


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    """As chat templates want it."""
    try:
        parameters = TypeAdapter(cast(Any, function)).json_schema()
    except (PydanticUserError, TypeError) as error:
        raise ValueError(f"{function} cannot be described as a tool: {error}") from error
    parameters.pop("title", None)
    about = {"name": function.__name__, "description": inspect.getdoc(function) or "", "parameters": parameters}
    return {"type": "function", "function": about}


def _wrong(part: Any) -> str:
    return f"{'.'.join(map(str, part['loc']))}: {part['msg']}"
