"""The tools of the environment ``tools``, which all trajectories of a process share."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import TypeAdapter, validate_call
from pydantic.errors import PydanticUserError

from penstock.protocols.experience import Prompt
from penstock.services.environments.mcp_server import McpServer, check_sdk, in_background
from penstock.services.environments.tool_class import Method, check_class, methods_of, prompted, waits
from penstock.services.environments.tools_config import READY, ToolsConfig, read_options
from penstock.services.runtime import allowance
from penstock.services.runtime.nearest import nearest
from penstock.services.runtime.plugins import load_plugin
from penstock.services.user_processes.sandbox.run import SandboxError


@dataclass(frozen=True)
class Remote:
    """A tool of a server."""

    server: int
    """Its place in the config."""
    name: str
    """What the server calls it."""


@dataclass
class Toolbox:
    """What the policy may call."""

    config: ToolsConfig
    schemas: list[dict[str, Any]] = field(default_factory=list)
    """As chat templates want them."""
    arguments: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """The JSON schema of each one's arguments, by its name."""
    tools: dict[str, Callable[..., Any] | Remote | Method] = field(default_factory=dict)
    """By the names that the policy knows."""
    prompted: dict[str, list[str]] = field(default_factory=dict)
    """By name, which arguments are not the policy's: they are the task's prompt."""
    servers: list[McpServer] = field(default_factory=list)
    starts: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(allowance.cores()))
    """Servers of trajectories that may start at once: each takes a core for a second or so."""
    made: type | None = None
    """Of which each trajectory has an object."""
    _written: dict[str, str] = field(default_factory=dict)
    """Where the config has each."""

    @property
    def plain(self) -> bool:
        """There is a class, and nothing of it, and no other tool, waits for anything: its objects live as those of any
        plain class."""
        others = [tool for tool in self.tools.values() if not isinstance(tool, Method)]
        waiting = any(isinstance(tool, Remote) or inspect.iscoroutinefunction(tool) for tool in others)
        return self.made is not None and not waiting and not waits(self.made)

    def add(self, about: dict[str, Any], tool: Callable[..., Any] | Remote | Method, written: str) -> None:
        """``about``: name, description and parameters, a JSON schema. Raises `ValueError` for a name that is taken."""
        name = about["name"]
        if name in self._written:
            kind = "mcp" if isinstance(tool, Remote) else "functions"
            way_out = "set prefix of one" if isinstance(tool, Remote) else "rename one"
            raise ValueError(
                f"{kind}: {self._written[name]} and {written} are both called {name!r}, and the policy could not say "
                f"which it means; {way_out}"
            )
        self._written[name], self.tools[name] = written, tool
        self.arguments[name] = about.get("parameters", {})
        self.schemas.append({"type": "function", "function": about})


@functools.cache
def toolbox(options: str) -> Toolbox:
    """The tools of these options (`ToolsConfig`, as JSON), made once in a process: servers are started, and ready tools
    tried. Raises `ValueError`, `PluginError` among it, or `ConnectionError` where a server does not start: both name
    the key below ``options``."""
    box = Toolbox(read_options(json.loads(options)))
    for name in box.config.functions:
        function = _ready(name, box.config) if name in READY else load_plugin(name, "functions")
        about, hidden = _about(function), prompted(function)
        box.add(_without(about, hidden), validate_call(function), name)
        box.prompted[about["name"]] = hidden
    if box.config.class_:
        _add_methods(box, box.config.class_)
    if not box.config.mcp:
        return box
    if lacks := box.config.lacking():
        raise ValueError("; ".join(lacks))
    check_sdk()
    box.servers = [McpServer(each, f"mcp.{index}") for index, each in enumerate(box.config.mcp)]
    for index, (server, found) in enumerate(zip(box.servers, _begin_all(box.servers), strict=True)):
        _add_tools(box, index, server, found)
    return box


def _add_methods(box: Toolbox, name: str) -> None:
    """Those of the class of this ``name``."""
    made = box.made = load_plugin(name, "class")
    check_class(made, name, box.config.class_options)
    for method, function in methods_of(made).items():
        about, hidden = _about(function) | {"name": method}, prompted(function)
        itself = next(iter(inspect.signature(function).parameters))
        box.add(_without(about, [itself, *hidden]), Method(validate_call(function)), f"{name}.{method}")
        box.prompted[method] = hidden


def _begin_all(servers: list[McpServer]) -> list[list[Any]]:
    """The tools of each, all started at once. A server of sessions ends again: each trajectory has its own. Raises
    `ConnectionError` with all that went wrong."""

    async def begin(server: McpServer) -> list[Any]:
        found = await server.begin()
        if server.config.per == "trajectory":
            await server.close()
        return found

    async def all_at_once() -> list[list[Any] | BaseException]:
        return await asyncio.gather(*map(begin, servers), return_exceptions=True)

    found = in_background(all_at_once()).result()
    if wrong := [str(each) for each in found if isinstance(each, BaseException)]:
        raise ConnectionError("; ".join(wrong))
    return [each for each in found if isinstance(each, list)]


def _add_tools(box: Toolbox, index: int, server: McpServer, found: list[Any]) -> None:
    wanted, there = server.config.tools, [tool.name for tool in found]
    for name in wanted or ():
        if name not in there:
            raise ValueError(f"mcp.{index}.tools: {server.config.name} has no {name!r}; {nearest(name, there)}")
    if not there:
        raise ValueError(f"{server.where}: it has no tools; leave it out")
    for tool in found:
        if wanted is None or tool.name in wanted:
            about = {"name": server.config.prefix + tool.name, "description": tool.description or ""}
            about["parameters"] = {key: value for key, value in tool.input_schema.items() if key != "title"}
            box.add(about, Remote(index, tool.name), server.where)


def _ready(name: str, config: ToolsConfig) -> Callable[..., Any]:
    try:
        return load_plugin(READY[name], "functions")(config.options_of(name), config.most_read)
    except SandboxError as error:
        raise ValueError(f"{name}: {error}") from error


def _without(about: dict[str, Any], hidden: Sequence[str]) -> dict[str, Any]:
    """``about`` a function, less the ``hidden`` parameters."""
    if not hidden:
        return about
    parameters = dict(about["parameters"])
    properties = {name: each for name, each in parameters["properties"].items() if name not in hidden}
    required = [name for name in parameters.pop("required", ()) if name not in hidden]
    defined = {name: each for name, each in parameters.pop("$defs", {}).items() if name != Prompt.__name__}
    parameters |= {"properties": properties} | ({"required": required} if required else {})
    return about | {"parameters": parameters | ({"$defs": defined} if defined else {})}


def _about(function: Callable[..., Any]) -> dict[str, Any]:
    """Of a function, by its type hints and docstring."""
    try:
        parameters = TypeAdapter(cast(Any, function)).json_schema()
    except (PydanticUserError, TypeError) as error:
        raise ValueError(f"{function} cannot be described as a tool: {error}") from error
    parameters.pop("title", None)
    return {"name": function.__name__, "description": inspect.getdoc(function) or "", "parameters": parameters}
