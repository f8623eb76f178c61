"""Requests by a name that is nobody's here. A server on the loopback that asks for no key is open to whatever runs on
this machine, and not to pages of the web: one whose own name was made to stand for the loopback (DNS rebinding) would
speak to it as to itself."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class OwnHost:
    """Middleware that refuses (421) a request to a host by name, but for ``localhost`` and those of ``names``."""

    def __init__(self, app: ASGIApp, names: frozenset[str] = frozenset()) -> None:
        self._app, self._names = app, names | {"localhost", ""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        asked = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        host = host_in(asked).removesuffix(".")
        if host in self._names or _is_address(host):
            await self._app(scope, receive, send)
            return
        said = f"the host {asked[:100]!r} is not known here; ask by localhost, or by an address such as 127.0.0.1"
        await PlainTextResponse(said, 421)(scope, receive, send)


def host_in(url: str) -> str:
    """Its name or address, also of a URL without its scheme; what is none is a name that nobody has."""
    try:
        return urlsplit(url if "://" in url else f"//{url}").hostname or ""
    except ValueError:
        return "?"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
