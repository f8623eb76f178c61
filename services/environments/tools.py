"""The environment ``tools``: functions that the policy may call before it answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from penstock.protocols.experience import Finish, Prompt
from penstock.protocols.turn import Turn
from penstock.services.environments.call_reading import parser
from penstock.services.environments.mcp_server import McpServer, ToolUnavailable, in_background
from penstock.services.environments.sessions import Sessions
from penstock.services.environments.threads import at_once, called
from penstock.services.environments.tool_calls import called_by, calls_in
from penstock.services.environments.tool_class import Method, ToolObject
from penstock.services.environments.tool_results import Parts, as_messages, of_returned
from penstock.services.environments.toolbox import Remote, toolbox
from penstock.services.environments.tools_config import READY
from penstock.services.turns.tool_calls import Said, read_call


class ToolSessions(Sessions):
    """Sessions of `Tools`, whose tools are there before the first of them begins."""

    def __init__(self, program: dict[str, Any]) -> None:
        super().__init__(program)
        try:
            self.is_async = not Tools(**program["options"]).plain
        except (ValueError, ConnectionError) as error:
            kind = ConnectionError if isinstance(error, ConnectionError) else ValueError
            raise kind(f"{program['key']}.options: {error}") from error

    def start(self, arguments: dict[str, Any]) -> Any:
        """See `Handler.start`."""
        if self.is_async:
            return super().start(arguments)
        return at_once(self._run(arguments["op"], arguments["session"], arguments["given"]))


class Tools:
    """Turns with calls are answered by their results, each a message of the role ``tool``; the first turn without one
    is the answer, and ends the task. Reward functions judge the last turn (``turns[-1]``); of the environment there is
    only the reward that an object of ``class`` gives.

    ``functions``: plain or async functions of yours, ``module:function``, or ready tools by name. Their type hints and
    docstrings are what the policy is told, by the tokenizer's chat template; a parameter that is a `penstock.Prompt` is
    not told, and is the task's. ``options``: see `ToolsConfig`.
    """

    def __init__(
        self, functions: Sequence[str] = (), shows: bool = False, reads: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """``shows``: the environment's ``pictures``; ``reads``: `call_reading.told_of`."""
        self._shows = shows
        self._box = toolbox(json.dumps({"functions": list(functions), **options}))
        self.tools = self._box.schemas
        self._parse = parser(self._box.config.tool_calls, reads)
        self._own: dict[int, McpServer] = {}
        """Servers of this trajectory alone, by their place in the config."""
        self.plain = self._box.plain
        """It waits for nothing."""
        made, given = self._box.made, self._box.config.class_options
        self._object = ToolObject(made, given, self.plain) if made else None
        self._task: Prompt | None = None
        self._one_program = asyncio.Lock()
        """A trajectory has one program at a time, or its turn could take all cores from the others."""

    async def reset(self, prompt: Prompt) -> Any:
        """What the functions may ask for. Returns what the task begins with, where an object says so."""
        self._task = prompt
        return await self._object.reset(prompt) if self._object else None

    async def step(
        self, answer: str, thinking: bool = False, finish_reason: Finish = "stop", marked: str = "", before: str = ""
    ) -> Turn:
        """See docs/environments.md."""
        calls = self._calls(Said(answer, marked, "", thinking, finish_reason == "length", before))
        if not calls:
            return Turn(reward=await self.finish() or 0.0, done=True)
        config = self._box.config
        most = config.calls
        if self.plain:
            results: list[Parts] = [await self._run(call) for call in calls[:most]]
        else:
            results = await asyncio.gather(*map(self._run, calls[:most]))
        results += [(f"error: at most {most} calls in a turn",)] * (len(calls) - most)
        told, pictures = as_messages(results, config.longest, config.cut)
        if self._parse:  # whoever tells of them has not found the calls
            told = [{**message, "name": called_by(call)} for message, call in zip(told, calls, strict=True)]
        return Turn(told, pictures=pictures)

    def _calls(self, said: Said) -> list[str]:
        """Each as JSON, or as it was written where it cannot be read."""
        if self._parse is None:
            return calls_in(said.text, self._box.config.form, self._box.arguments, said.thinking)
        found = self._parse(replace(said, tools=json.dumps(self.tools)))[1]
        return [json.dumps({"name": call.name, "arguments": call.arguments}) for call in found]

    async def finish(self) -> float | None:
        """The trajectory's reward, at its end; None where nobody gives one."""
        return await self._object.reward() if self._object else None

    async def close(self) -> None:
        """Ends what was this trajectory's alone."""
        if self._object:
            await self._object.close()
        if self._own:
            await asyncio.gather(*(asyncio.wrap_future(in_background(server.close())) for server in self._own.values()))

    async def _run(self, text: str) -> Parts:
        """What the policy reads of one call; where it was wrong, what was. Raises `ToolUnavailable`, and `TypeError`
        for a result of verl's form."""
        try:
            name, arguments = read_call(text)
        except ValueError:
            return ('error: a call is JSON, {"name": …, "arguments": {…}}',)
        tool = self._box.tools.get(name) if isinstance(name, str) else None
        if tool is None:
            return (f"error: there is no function {name!r}; there are {', '.join(self._box.tools)}",)
        if not isinstance(arguments, dict):
            return (f'error: {name}: arguments must be an object of names and values, like {{"name": 1}}',)
        if isinstance(tool, Remote):
            if wrong := _unsendable(arguments):
                return (f"error: {name}: {wrong}",)
            asked = self._server(tool).call(tool.name, arguments, self._shows)
            return await asyncio.wrap_future(in_background(asked))
        arguments = {**arguments, **dict.fromkeys(self._box.prompted.get(name, ()), self._task)}
        try:
            if isinstance(tool, Method):
                assert self._object
                result = await self._object.call(tool, arguments)
            else:
                async with self._one_program if name in READY else nullcontext():
                    result = await called(tool, arguments, self.plain)
            parts = of_returned(result)
        except ToolUnavailable:
            raise
        except ValidationError as error:
            return (f"error: {name}: {'; '.join(_wrong(part) for part in error.errors())}",)
        except Exception as error:  # the user's own code; the policy may do better next time
            return (f"error: {name} raised {type(error).__name__}: {error}",)
        if _is_verls(result):  # the policy would read its reward
            raise TypeError(
                f"{name} returned a tuple with a reward and metrics, as verl's execute does, and a call has no reward "
                "here: return what the policy is to read (a list, if it is to read all of it), and give the reward in "
                "get_reward() of a class"
            )
        return parts

    def _server(self, tool: Remote) -> McpServer:
        shared = self._box.servers[tool.server]
        if shared.config.per == "worker":
            return shared
        if tool.server not in self._own:
            self._own[tool.server] = McpServer(shared.config, f"mcp.{tool.server}", self._box.starts)
        return self._own[tool.server]


def _unsendable(arguments: dict[str, Any]) -> str:
    """Why no server is sent these; empty where one is. What the SDK cannot write ends the server's whole connection."""
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "arguments have half of a character (a surrogate without its pair)"
    except RecursionError:
        return "arguments are nested too deeply"
    return ""


def _is_verls(result: Any) -> bool:
    """A response, a reward or None, and metrics."""
    match result:
        case (_, int() | float() | None, dict()) if isinstance(result, tuple):
            return True
    return False


def _wrong(part: Any) -> str:
    return f"{'.'.join(map(str, part['loc']))}: {part['msg']}"
