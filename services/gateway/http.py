"""The gateway's HTTP door: sessions, and in each of them what agents already speak."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

import numpy as np
from fastapi import Depends, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from penstock.protocols.experience import FLOAT32_MAX
from penstock.services.gateway import chat, messages
from penstock.services.gateway.desk import Desk
from penstock.services.gateway.errors import AgentError
from penstock.services.gateway.session import Turn
from penstock.services.gateway.work import Held

LOOK_S = 0.5
"""Between two looks at whether the agent is still there."""
SOON_S = 10.0
LARGEST = 16 << 20
"""Bytes of a request's body."""


class Wanted(BaseModel):
    """Of ``POST /v1/sessions``."""

    model_config = ConfigDict(extra="forbid")
    wait_s: float = Field(30.0, ge=0, le=300)
    """How long to wait for a task."""


class Finished(BaseModel):
    """Of ``POST /v1/sessions/SESSION/finish``."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    reward: float | None = Field(None, ge=-FLOAT32_MAX, le=FLOAT32_MAX)
    """How good it was; without it the run's reward functions say so."""


class Abandoned(BaseModel):
    """Of ``POST /v1/sessions/SESSION/abandon``."""

    model_config = ConfigDict(extra="forbid")
    reason: str = Field("given up by its agent", max_length=1000)


class Tokens(BaseModel):
    """Of ``POST /s/SESSION/v1/generate``."""

    model_config = ConfigDict(extra="forbid")
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(min_length=1)
    """Everything before the answer."""
    max_tokens: int | None = Field(None, ge=1)
    again: bool = False
    """It was asked for before, and the answer did not arrive."""


def described(held: Held, base: str) -> dict[str, Any]:
    """A session, as an agent is told of it."""
    lease = held.work.lease
    return {
        "session": held.id,
        "base_url": f"{base}/s/{held.id}/v1",
        "purpose": lease.purpose,
        "task": lease.prompt.model_dump(),
        "group": lease.number,
        "place": held.session.place,
    }


def make_app(desk: Desk, model: str, key: str | None) -> FastAPI:
    """The routes. ``key``: what agents must show as a bearer, or as Anthropic's ``x-api-key``; None: nothing."""

    async def allowed(request: Request) -> None:
        if key is None:
            return
        shown = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(shown.encode(), key.encode()):
            raise AgentError(401, "wrong_key", "Authorization: give the key of the run's folder, keys/agents.key")

    app = FastAPI(title="Penstock gateway", dependencies=[Depends(allowed)], docs_url=None, redoc_url=None)
    app.add_exception_handler(AgentError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.middleware("http")(_not_too_large)
    _add_sessions(app, desk)
    _add_openai(app, desk, model)
    _add_anthropic(app, desk, model)
    return app


def _add_sessions(app: FastAPI, desk: Desk) -> None:
    @app.post("/v1/sessions")
    async def open_session(wanted: Wanted, request: Request) -> dict[str, Any]:
        """The next task of the run that no agent has."""
        return described(await desk.open(wanted.wait_s), str(request.base_url).rstrip("/"))

    @app.get("/v1/sessions")
    async def list_sessions() -> list[dict[str, Any]]:
        """Those that agents have."""
        return desk.rows()

    @app.post("/v1/sessions/{session}/finish")
    async def finish(session: str, said: Finished) -> dict[str, str]:
        """The agent is done."""
        await desk.finish(session, said.reward)
        return {"session": session, "state": "finished"}

    @app.post("/v1/sessions/{session}/abandon")
    async def abandon(session: str, said: Abandoned) -> dict[str, str]:
        """The agent gives up: another may try."""
        await desk.abandon(await desk.find(session), said.reason)
        return {"session": session, "state": "abandoned"}

    @app.post("/s/{session}/v1/generate")
    async def generate(session: str, asked: Tokens, request: Request) -> dict[str, Any]:
        """The policy's answer to tokens."""
        held = await desk.find(session)
        tokens = np.array(asked.tokens, np.int32)
        turn = await _heard(request, held, desk.generate(held, tokens, asked.max_tokens, asked.again))
        answer = turn.answer
        return {
            "turn": turn.number,
            "tokens": answer.tokens.tolist(),
            "logprobs": answer.logprobs.tolist(),
            "versions": answer.versions.tolist(),
            "finish": answer.finish,
        }


def _add_openai(app: FastAPI, desk: Desk, model: str) -> None:
    @app.get("/s/{session}/v1/models")
    async def models(session: str) -> dict[str, Any]:
        """The policy."""
        await desk.find(session)
        return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "penstock"}]}

    @app.post("/s/{session}/v1/chat/completions", response_model=None)
    async def completions(
        session: str, asked: chat.ChatRequest, request: Request, x_stainless_retry_count: Annotated[int, Header()] = 0
    ) -> dict[str, Any] | StreamingResponse:
        """OpenAI's chat completions."""
        held, again = await desk.find(session), x_stainless_retry_count > 0

        async def answers() -> list[Turn]:
            one = [desk.chat(held, asked.said, asked.tools, asked.most, asked.stops, again) for _ in range(asked.n)]
            return list(await asyncio.gather(*one))

        if asked.stream:
            return await _stream(request, held, answers(), lambda turns: chat.chunks(held.id, model, turns, asked))
        return chat.completion(held.id, model, await _heard(request, held, answers()), desk.replies, asked)


def _add_anthropic(app: FastAPI, desk: Desk, model: str) -> None:
    @app.post("/s/{session}/v1/messages", response_model=None)
    async def create(
        session: str, asked: messages.MessagesRequest, request: Request,
        x_stainless_retry_count: Annotated[int, Header()] = 0,
    ) -> dict[str, Any] | StreamingResponse:  # fmt: skip
        """Anthropic's messages."""
        held, again = await desk.find(session), x_stainless_retry_count > 0
        answer = desk.chat(held, asked.said(), asked.functions(), asked.max_tokens, asked.stop_sequences, again)
        if asked.stream:
            return await _stream(request, held, answer, lambda turn: messages.events(held.id, model, turn))
        return messages.message(held.id, model, await _heard(request, held, answer))

    @app.post("/s/{session}/v1/messages/count_tokens")
    async def count(session: str, asked: messages.CountRequest) -> dict[str, int]:
        """How many tokens a conversation begins with."""
        return {"input_tokens": desk.count(await desk.find(session), asked.said(), asked.functions())}


async def _heard(request: Request, held: Held, answer: Any) -> Any:
    """The answer, unless whoever asked has gone: then nobody is trained on what nobody has heard."""
    task = asyncio.ensure_future(answer)
    while not task.done():
        await asyncio.wait({task}, timeout=LOOK_S)
        if not task.done() and await request.is_disconnected():
            task.add_done_callback(lambda done: _unheard(held, done))
            raise AgentError(499, "gone", "the agent has gone")
    return task.result()


def _unheard(held: Held, done: asyncio.Task[Any]) -> None:
    if not done.cancelled() and not done.exception():
        found = done.result()
        for turn in found if isinstance(found, list) else [found]:
            turn.wanted = False


async def _stream(request: Request, held: Held, answer: Any, events: Any) -> StreamingResponse:
    """Server-sent events. The answer comes at once, when the turn is durable; until then comments keep the line. What
    goes wrong soon is told by a status of its own."""
    task = asyncio.ensure_future(_heard(request, held, answer))
    await asyncio.wait({task}, timeout=SOON_S)
    if task.done():
        task.result()

    async def lines() -> AsyncIterator[str]:
        said = time.monotonic()
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_S)
                if not task.done() and time.monotonic() - said > 5:
                    said = time.monotonic()
                    yield ": the policy is at it\n\n"
            for line in events(task.result()):
                yield line
        except AgentError as error:
            yield f"event: error\ndata: {chat.dumps(_body(error))}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


def _body(error: AgentError) -> dict[str, Any]:
    return {"type": "error", "error": {"message": str(error), "type": error.code, "code": error.code, "param": None}}


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, AgentError)
    headers = {"Retry-After": f"{error.retry_s:g}"} if error.retry_s else {}
    return JSONResponse(_body(error), error.status, headers)


async def _invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    wrong = "; ".join(f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()[:3])
    return JSONResponse(_body(AgentError(422, "invalid_request", wrong)), 422)


async def _not_too_large(request: Request, following: Any) -> Any:
    size = request.headers.get("content-length", "")
    if request.method == "POST" and (not size.isdigit() or int(size) > LARGEST):
        said = AgentError(413, "too_large", f"a request has at most {LARGEST} bytes, and says how many it has")
        return JSONResponse(_body(said), 413)
    return await following(request)
