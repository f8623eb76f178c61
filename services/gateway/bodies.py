"""Bodies of requests: not too large, not waited for without end, and not read of anybody."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.services.gateway.access import WHO, Access, Visitor
from penstock.services.gateway.address import let_in, shown_in
from penstock.services.gateway.errors import AgentError

LARGEST, LARGEST_SHOWN = 16 << 20, 48 << 20
"""Bytes; and where agents may show pictures, all of which most clients send again with each request."""
SMALLEST, BYTES_A_TOKEN = 1 << 20, 64
"""Whatever the context; and many times what a token takes in JSON, with thoughts that are not told again."""
HELD = 256 << 20
"""Bytes of all requests that are read or answered at once for those who come in by one named key."""
TURNLESS = re.compile(r"/v1/sessions(/[^/]*/(reward|finish|abandon))?$")
"""Paths of requests that are no turns, nor take as long to be read."""
JSON = b"application/json"
BODY_S = 60.0
"""For all of it to arrive."""


def largest_body(max_length: int | None, pictures: bool) -> int:
    """Bytes of a request, where a conversation has so many tokens (None: nobody knows): the gateway's one loop reads
    it, and others wait meanwhile."""
    text = LARGEST if max_length is None else min(LARGEST, max(SMALLEST, BYTES_A_TOKEN * max_length))
    return text + (LARGEST_SHOWN - LARGEST) * pictures


class Bodies:
    """Middleware that has the whole of a body before anybody looks at it. What is behind it can see at any moment
    whether the agent is still there, which Starlette's own base for middleware hides. ``find`` is told of a session
    that is spoken of in what is refused (`Desk.find`)."""

    def __init__(self, app: ASGIApp, access: Access, largest: int, find: Callable[[str], Awaitable[object]]) -> None:
        self._app, self._access, self._largest, self._find = app, access, largest, find

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            who, session = let_in(self._access, shown_in(Headers(scope=scope)))
            if not TURNLESS.search(scope["path"]):
                await self._check_turns(who, scope["path"], session)
            with who.holds(_size(scope, self._largest), HELD):
                await self._with_body(await _body(receive), scope, receive, send)
        except AgentError as error:
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)

    async def _check_turns(self, who: Visitor, path: str, session: str) -> None:
        """Before anybody takes the time to read what is refused; its session's agent has said a word all the same.
        Raises `AgentError`."""
        try:
            who.check_turns()
        except AgentError:
            WHO.set(who)
            with suppress(AgentError):
                await self._find(path.split("/")[2] if path.startswith("/s/") else session)
            raise

    async def _with_body(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        told = False

        async def again() -> Message:
            nonlocal told
            if told:
                return await receive()
            told = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app({**scope, "headers": _as_json(scope["headers"])}, again, send)


def _as_json(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """A body is JSON whatever its type says, as curl says another. But a browser's page, which names its origin, has to
    say so: then its browser asks first, and any page could else speak to a gateway that asks for no key."""
    named = dict(headers)
    if b"origin" in named:
        return headers
    return [*((name, value) for name, value in headers if name != b"content-type"), (b"content-type", JSON)]


def _size(scope: Scope, largest: int) -> int:
    size = dict(scope["headers"]).get(b"content-length", b"")
    if not size.isdigit():
        raise AgentError(411, "length_needed", "a request says in Content-Length how many bytes it has")
    if int(size) > largest:
        raise AgentError(413, "too_large", f"a request has at most {largest} bytes")
    return int(size)


async def _body(receive: Receive) -> bytes:
    parts = []
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise AgentError(499, "gone", "the agent has gone")
                parts.append(message.get("body", b""))
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise AgentError(408, "too_slow", f"a request's body arrives within {BODY_S:g} s") from None
