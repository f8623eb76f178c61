"""What an agent is told that it did wrong, or that the pipeline cannot do: an HTTP status, a word for programs, and a
sentence for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from penstock.protocols.mailbox import RefusedError

LOST, LEAVING = "session_lost", "gateway_leaves"
MOST_SAID = 500
"""Characters of what is told of one thing that is wrong."""


class AgentError(Exception):
    """Costs this request alone. ``retry_s``: it may be asked again after so long; ``details``: for clients that look
    for them."""

    def __init__(
        self, status: int, code: str, message: str, retry_s: float | None = None, details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_s, self.details = status, code, retry_s, details

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer that says so. HTTP knows whole seconds alone."""
        return {"Retry-After": f"{math.ceil(self.retry_s)}"} if self.retry_s else {}

    @property
    def body(self) -> dict[str, Any]:
        """As both OpenAI's and Anthropic's clients read it."""
        # Half a surrogate pair, which JSON can say, has no UTF-8.
        words = str(self).encode(errors="replace").decode()
        about: dict[str, Any] = {"message": words, "type": self.code, "code": self.code, "param": None}
        return {"type": "error", "error": about | ({"details": self.details} if self.details else {})}


def no_room(size: int, most: int, why: str) -> AgentError:
    """Of a conversation of ``size`` tokens, an answer's first among them, where ``most`` have room. Clients know it by
    the words of OpenAI's and of Anthropic's API, which they look for."""
    return AgentError(
        400, "context_length_exceeded",
        f"This model's maximum context length is {most} tokens. However, your messages resulted in {size} tokens "
        f"(prompt is too long: {size} tokens > {most} maximum): {why}",
    )  # fmt: skip


def what_is_wrong(errors: Sequence[Any], skip: int = 0) -> str:
    """Pydantic's ``errors`` for people: the first three, each with where it is, less the first ``skip`` steps. Names
    and what was said are quoted in part: they may be as long as the request."""
    told = []
    for each in errors[:3]:
        where, what = ".".join(map(str, each["loc"][skip:])), each["msg"].removeprefix("Value error, ")
        if each["type"] == "json_invalid":  # of FastAPI, which says where by a number alone
            where, what = "", f"the body is no JSON: {each['ctx']['error']}, behind character {where}"
        told.append(f"{where}: {what}" if where else what)
    return "; ".join(said if len(said) <= MOST_SAID else f"{said[:MOST_SAID]}…" for said in told)


class About(BaseModel):
    """What is wrong."""

    message: str
    type: str
    code: str
    param: None = None
    details: dict[str, Any] | None = None
    """Of what Anthropic's clients then do otherwise."""


class Refused(BaseModel):
    """The body of every answer that is none."""

    type: str = "error"
    error: About


MEANINGS = {
    400: "the policy cannot be asked this",
    401: "the key is missing, or wrong",
    404: "there is no such path, session, turn, response or model",
    405: "another method's path",
    408: "the request did not arrive in time",
    409: "the session is finished",
    410: "the session, or the run, is over",
    411: "the body does not say how long it is",
    413: "too large",
    422: "not what is asked for here",
    429: "too much at once: ask again after Retry-After",
    499: "the agent has gone",
    503: "nothing is free now: ask again after Retry-After",
    504: "the policy was too slow: ask again",
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Refused, "description": meaning} for status, meaning in MEANINGS.items()
}
"""For the document that describes the routes."""


def refused(error: RefusedError) -> AgentError:
    """What an agent is told where the broker has refused what was said of its group."""
    if error.code == "not_held":
        return AgentError(410, LOST, f"the session is not this gateway's any more: {error}")
    return AgentError(503, "broker_away", f"the broker has refused it: {error}; ask again", 5.0)
