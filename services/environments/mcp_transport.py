"""How bytes reach a server of the Model Context Protocol: a process's pipes, or HTTP. Needs the extra ``mcp``."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx2
import structlog
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, jsonrpc_message_adapter

from penstock.services.runtime.guard import GRACE_S, guarded

log = structlog.get_logger()

MOST_BYTES = 64 << 20
"""Of one message; a server that says more without an end is taken for broken."""
FIRST_WAIT_S, LAST_WAIT_S = 0.25, 30.0
"""Between attempts to reach a server: each wait is twice the one before."""
BAD_REQUEST, NOT_FOUND = 400, 404
_NO_SESSION = re.compile(
    rb"(no valid|invalid|unknown|missing|expired) session|session.{0,60}(not found|not valid|expired|unknown)"
    rb"|not initialized",
    re.IGNORECASE,
)
"""What servers that have forgotten a session say of it with a status of 400."""


@asynccontextmanager
async def stdio(
    command: Sequence[str], variables: Sequence[str], folder: Path, ended: Callable[[str], object]
) -> AsyncIterator[Any]:
    """Starts a server in ``folder`` with the environment variables of these names, yields the streams that a
    `mcp.Client` reads and writes, and ends it with all that it has started. ``ended`` is told once it says no more, and
    why."""
    process = await asyncio.create_subprocess_exec(
        *guarded(command, variables), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        start_new_session=True, cwd=folder,
    )  # fmt: skip
    heard, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, told = anyio.create_memory_object_stream[SessionMessage](0)

    async def reading() -> None:
        why = "it closed its stdout"
        async with heard:
            try:
                async for line in _lines(process.stdout):
                    if message := _parsed(line):
                        await heard.send(message)
                if code := await _exit_code(process):
                    why = f"it ended with exit code {code}"
            except ValueError as error:
                why = str(error)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):  # nobody listens any more
                return
            ended(why)

    async def writing() -> None:
        assert process.stdin
        async with told:
            async for message in told:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                with suppress(ConnectionError):  # `reading` hears of its end
                    process.stdin.write(f"{text}\n".encode())
                    await process.stdin.drain()

    try:
        async with anyio.create_task_group() as group, heard, read, write, told:
            group.start_soon(reading)
            group.start_soon(writing)
            yield read, write
            group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _lines(stream: asyncio.StreamReader | None) -> AsyncIterator[bytes]:
    """Raises `ValueError` for one that is longer than `MOST_BYTES`."""
    assert stream
    begun = bytearray()
    while data := await stream.read(1 << 16):
        *whole, rest = data.split(b"\n")
        for line in whole:
            yield bytes(begun) + line
            begun.clear()
        begun += rest
        if len(begun) > MOST_BYTES:
            raise ValueError(f"it said more than {MOST_BYTES >> 20} MiB without the end of a line")


def _parsed(line: bytes) -> SessionMessage | None:
    """None for what is no message: some servers print a greeting."""
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError:
        if line.strip():
            log.warning("an MCP server printed what is no message", line=line[:200].decode(errors="replace"))
        return None


async def _exit_code(process: asyncio.subprocess.Process) -> int:
    """Of one whose stdout has ended; 0 also where it does not end."""
    with suppress(TimeoutError):
        async with asyncio.timeout(GRACE_S):
            await process.wait()
    return process.returncode or 0


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin
    process.stdin.close()
    with suppress(ProcessLookupError):
        process.terminate()  # its guard gives it `GRACE_S`
    with suppress(TimeoutError):
        async with asyncio.timeout(2 * GRACE_S):
            await process.wait()


class Http(httpx2.AsyncClient):
    """The SDK's whole connection, with all calls that are under way, ends where one request raises: here what it would
    raise is that request's answer. A server that is not reached is tried again for ``patience_s`` seconds."""

    def __init__(self, headers: Mapping[str, str], timeout_s: float) -> None:
        """``timeout_s``: to connect; each call has a deadline of its own."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
        super().__init__(headers=dict(headers), limits=limits, timeout=httpx2.Timeout(timeout_s, read=None))
        self.patience_s = 0.0
        self.lost = ""
        """Why it is not reached now; empty where it is."""

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """See `httpx2.AsyncClient`."""
        if request.method == "DELETE":
            return await self._goodbye(request, **options)
        give_up, wait_s = time.monotonic() + self.patience_s, FIRST_WAIT_S
        while True:
            try:
                response = await super().send(request, **options)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                self.lost = f"it is not reached: {error}"
                if time.monotonic() + wait_s > give_up:
                    return _failed(request, self.lost)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LAST_WAIT_S)
            except httpx2.TransportError as error:
                return _failed(request, f"the connection broke: {error}")
            else:
                self.lost = ""
                return await _said(request, response)

    async def _goodbye(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """The end of a session, which a server may let be for all that we care: what comes next waits for it."""
        try:
            async with asyncio.timeout(GRACE_S):
                return await super().send(request, **options)
        except (TimeoutError, httpx2.RequestError) as error:
            return _failed(request, f"it did not end the session: {error}")


async def _said(request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
    """What the SDK is to read of it. JSON is read here, since one that breaks off would raise there. A session that is
    not known any more becomes the one answer which the SDK takes for that, 404 without a body. A refusal without words
    gets its status for them: the SDK would leave that out."""
    if request.method != "POST":
        return response
    status, kind = response.status_code, response.headers.get("content-type", "").lower()
    is_json = kind.startswith("application/json")
    body = b""
    if is_json or status == BAD_REQUEST:
        try:
            body = await response.aread()
        except httpx2.RequestError as error:
            return _failed(request, f"the connection broke: {error}")
    of_session = "mcp-session-id" in request.headers
    if of_session and (status == NOT_FOUND or (status == BAD_REQUEST and _NO_SESSION.search(body))):
        await response.aclose()
        return httpx2.Response(NOT_FOUND, request=request)
    if status < BAD_REQUEST or status == NOT_FOUND or is_json:
        return response
    await response.aclose()
    return _failed(request, f"HTTP {status} {response.reason_phrase}")


def _failed(request: httpx2.Request, why: str) -> httpx2.Response:
    try:
        number = json.loads(request.content)["id"]
    except (ValueError, KeyError, TypeError, httpx2.RequestNotRead):  # no call's request
        number = None
    error = {"jsonrpc": "2.0", "id": number, "error": {"code": INTERNAL_ERROR, "message": why}}
    return httpx2.Response(502, request=request, json=error)


@asynccontextmanager
async def http(url: str, client: Http) -> AsyncIterator[Any]:
    """Yields the streams of a server at ``url``; ends ``client`` with it."""
    async with client, streamable_http_client(url, http_client=client) as streams:
        yield streams
