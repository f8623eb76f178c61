"""Servers of the Model Context Protocol (modelcontextprotocol.io), whose tools the policy calls.

    begin ──▶ up ──▶ calls, all at once
              ▲ │
     backoff ─┘ └─ it ended: what was under way fails, and what comes waits

They live in an event loop of a thread of their own: what a user's function does in this process delays no call, and a
worker that begins can wait for them before it has a loop.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from penstock.services.environments.tool_results import Parts, of_server
from penstock.services.environments.tools_config import McpServerConfig, with_variables
from penstock.services.runtime.install import install
from penstock.services.runtime.user_folders import folder_of

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult, Tool

log = structlog.get_logger()
T = TypeVar("T")

STABLE_S = 10.0
"""A server that was up for so long and ends is started again at once."""
MOST_SILENT = 3
"""Calls in a row that were not answered in time; then it is asked for its tools, and ended where it is silent again."""
MOST_PAGES = 100
"""Of a list of tools."""
INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
"""Environment variables that each command is given."""

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


class ToolUnavailable(RuntimeError):
    """A tool cannot be called, by no doing of the policy's: its trajectory has no reward."""


def in_background(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Begins it in the servers' loop."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="mcp", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(coroutine, _loop)


class McpServer:
    """One server that is started here, or one session of one that is elsewhere. All methods are for `in_background`.

    ``key``: the config's, for errors. ``starts``: how many may start at once, where there are several."""

    def __init__(self, config: McpServerConfig, key: str, starts: asyncio.Semaphore | None = None) -> None:
        self.config, self.where = config, f"{key} ({config.name})"
        self._starts = starts or asyncio.Semaphore()
        self._secrets: dict[str, str] = {}
        """Values of environment variables that errors are not to tell, by name."""
        self._client: Client | None = None
        self._up = asyncio.Event()
        self._over = asyncio.Event()
        self._lost, self._ended = "it has not started yet", ""
        """Why it is not there, empty where it is; why it ended, where that is known."""
        self._first: asyncio.Future[tuple[list[Tool], str]] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._http: Any = None
        self._silent = 0
        """Calls in a row that were not answered in time."""
        self._asked: asyncio.Task[None] | None = None

    async def begin(self) -> list[Tool]:
        """Its tools, once it has started. Raises `ConnectionError` where it does not."""
        self._open()
        assert self._first
        tools, why = await self._first
        if why:
            await self.close()
            raise ConnectionError(f"{self.where}: {why}")
        return tools

    async def call(self, name: str, arguments: dict[str, Any], shows: bool = False) -> Parts:
        """What the policy reads: the result, or what went wrong behind ``error: ``. ``shows``: see `of_server`. Begins
        the server where it has not begun, and has ``start_s`` for that. Raises `ToolUnavailable` where it is not there
        within ``timeout_s`` from then on."""
        from mcp import MCPError

        self._open()
        assert self._first
        began = time.monotonic()
        await asyncio.wait([self._first], timeout=self.config.start_s)
        try:
            async with asyncio.timeout(self.config.timeout_s):
                found = await self._called(name, arguments)
                self._silent = 0
                return of_server(name, found, shows)
        except TimeoutError:
            if lost := self._why_lost():
                waited = f"it was waited for {time.monotonic() - began:.3g} s"
                raise ToolUnavailable(f"{self.where}: {lost}; {waited}") from None
            self._silent += 1
            if self._client and self._silent >= MOST_SILENT and (self._asked is None or self._asked.done()):
                self._asked = asyncio.create_task(self._ask(self._client))
            return (f"error: {name}: {self.config.name} did not answer within {self.config.timeout_s:g} s",)
        except MCPError as error:
            if self._http and self._http.lost:
                raise ToolUnavailable(f"{self.where}: {self._http.lost}") from None
            if self._lost:
                return (f"error: {name}: {self.config.name} ended before it answered",)
            return (f"error: {name}: {self._words(error)}",)
        except Exception as error:  # a result that breaks the protocol, say: the SDK raises what it likes
            return (f"error: {name}: {self._words(error)}",)

    async def close(self) -> None:
        """Ends the server, or the session."""
        for task in (self._asked, self._keeper):
            if task:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def _open(self) -> None:
        if self._keeper is None:
            self._first = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep())

    async def _called(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        from mcp import MCPError

        for last in (False, True):
            while self._client is None:
                await self._up.wait()
            client = self._client
            try:
                return await client.call_tool(name, arguments)
            except MCPError as error:  # of a server that was started again: it has called nothing
                if last or error.message != "Session terminated":
                    raise
                self._drop(client, "it was started again")
        raise AssertionError

    async def _ask(self, client: Client) -> None:
        """Has a server started again that answers nothing any more, and not one whose tools are slow alone."""
        with suppress(Exception):  # of whatever it does answer
            try:
                async with asyncio.timeout(self.config.timeout_s):
                    await client.list_tools(cache_mode="bypass")
            except TimeoutError:
                self._drop(client, "it answered nothing any more")
        self._silent = 0

    async def _keep(self) -> None:
        """Has it started again whenever it ends."""
        from penstock.services.environments.mcp_transport import FIRST_WAIT_S, LAST_WAIT_S

        wait_s = FIRST_WAIT_S
        while True:
            began, self._ended = time.monotonic(), ""
            try:
                await self._once()
            except Exception as error:  # whatever the SDK raises, mostly in groups
                self._drop(self._client, self._words(error))
            self._lost = self._ended
            assert self._first
            if not self._first.done():
                self._first.set_result(([], self._lost))
            if time.monotonic() - began > STABLE_S:
                wait_s = FIRST_WAIT_S
            await asyncio.sleep(wait_s)
            log.warning("an MCP server is started again", server=self.where, reason=self._lost, after_s=wait_s)
            wait_s = min(2 * wait_s, LAST_WAIT_S)

    async def _once(self) -> None:
        """From its start to its end."""
        from mcp import Client, Implementation

        self._over.clear()
        async with AsyncExitStack() as stack:
            try:
                async with self._starts, asyncio.timeout(self.config.start_s):
                    about = Implementation(name="penstock", version=version("penstock"))
                    client = Client(self._transport(), client_info=about)
                    await stack.enter_async_context(client)
                    tools = await _listed(client)
            except TimeoutError:
                raise ValueError(f"it was not ready within {self.config.start_s:g} s") from None
            self._client, self._lost = client, ""
            self._up.set()
            if self._http:
                self._http.patience_s = self.config.timeout_s
            assert self._first
            if not self._first.done():
                self._first.set_result((tools, ""))
            try:
                await self._over.wait()
            finally:  # also where its connection broke: nobody is to call it while that unwinds
                self._drop(client, "")

    def _transport(self) -> Any:
        from penstock.services.environments import mcp_transport

        config = self.config
        if config.command is None:
            assert config.url
            headers = {name: self._filled(text) for name, text in config.headers.items()}
            self._http = mcp_transport.Http(headers, config.start_s)
            return mcp_transport.http(self._filled(config.url), self._http)
        command = [self._filled(word) for word in shlex.split(config.command)]
        self._secrets.update({name: os.environ[name] for name in config.env if name in os.environ})
        variables = [*INHERITED, *config.env]
        return mcp_transport.stdio(command, variables, folder_of(command), lambda why: self._drop(self._client, why))

    def _drop(self, client: Client | None, why: str) -> None:
        """``client`` is of no use any more; ``why`` is empty where that is to be told later."""
        if client is self._client:
            self._client, self._ended = None, self._ended or why
            self._lost = self._ended or "its connection ended"
            self._up.clear()
            self._over.set()

    def _why_lost(self) -> str:
        """Empty where it is there."""
        return self._lost or (self._http.lost if self._http else "")

    def _filled(self, text: str) -> str:
        return with_variables(text, self._secrets.__setitem__)

    def _words(self, error: BaseException) -> str:
        """What went wrong, in one line and without secrets."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        words = " ".join(str(error).split()) or type(error).__name__
        for name, value in self._secrets.items():
            words = words.replace(value, f"${{{name}}}") if value else words
        return words[:300]


async def _listed(client: Client) -> list[Tool]:
    tools: list[Tool] = []
    cursor = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


def check_sdk() -> None:
    """Raises `ValueError` where the SDK is not installed, or is an old one."""
    try:
        from mcp import Client  # noqa: F401
    except ImportError as error:
        raise ValueError(f"the SDK of MCP (mcp>=2) cannot be imported: {error}; run: {install('mcp')}") from None
