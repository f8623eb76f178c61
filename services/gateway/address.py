"""Which session a request speaks of: its path says so, ``/s/SESSION/v1/…``, or its key does, ``KEY:SESSION``."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import Headers

from penstock.services.gateway.access import OWNER, Access, Visitor
from penstock.services.gateway.errors import AgentError


def shown_in(headers: Headers) -> str:
    """The key of a request: a bearer, or Anthropic's ``x-api-key``; empty: none."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")


def let_in(access: Access, shown: str) -> tuple[Visitor, str]:
    """Who shows this over HTTP, and the session that it names; empty: none. Where nobody needs a key, a session's name
    alone will do. Raises `AgentError`."""
    key, colon, session = shown.rpartition(":")
    if colon:
        return access.by_bearer(key), session
    who = access.by_bearer(shown)
    return who, shown if who is OWNER and not access.required else ""


async def in_path(session: str) -> None:
    """Has the path's part in the document."""


async def _spoken_of(request: Request) -> str:
    session = request.path_params.get("session") or request.state.session
    if not session:
        raise AgentError(
            404, "unknown_session",
            "say which session: by the base URL …/s/SESSION/v1, or by the API key KEY:SESSION",
        )  # fmt: skip
    return str(session)


Session = Annotated[str, Depends(_spoken_of)]
"""The session's name. Raises `AgentError` where a request says none."""
