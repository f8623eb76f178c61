"""The gateway's HTTP door: sessions, and in each of them what agents already speak."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import numpy as np
import structlog
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import APIKeyHeader, HTTPBearer
from pydantic import ConfigDict, Field
from starlette.exceptions import HTTPException

from penstock.protocols.experience import MOST_REWARD, Branches
from penstock.protocols.messages.agents import MOST_WAIT_S
from penstock.services.gateway.access import WHO, Access
from penstock.services.gateway.address import in_path, let_in, shown_in
from penstock.services.gateway.anthropic_routes import anthropic_routes
from penstock.services.gateway.asking import Body, Listed
from penstock.services.gateway.bodies import Bodies, largest_body
from penstock.services.gateway.desk import Desk
from penstock.services.gateway.errors import REFUSALS, AgentError, what_is_wrong
from penstock.services.gateway.fruitless import PEER
from penstock.services.gateway.model_routes import model_routes
from penstock.services.gateway.openai_routes import openai_routes
from penstock.services.gateway.pictures import data_url
from penstock.services.gateway.questions import Asking
from penstock.services.gateway.waiting import heard
from penstock.services.gateway.work import Held
from penstock.services.runtime.own_host import OwnHost, host_in

log = structlog.get_logger()

SHOWN: tuple[Callable[..., Any], ...] = HTTPBearer(auto_error=False), APIKeyHeader(name="x-api-key", auto_error=False)
"""For the document: what `shown_in` reads."""


class Wanted(Body):
    """Of ``POST /v1/sessions``."""

    model_config = ConfigDict(extra="forbid")
    wait_s: float = Field(30.0, ge=0, le=MOST_WAIT_S, allow_inf_nan=False)
    """How long to wait for a task."""


Reward = Annotated[float, Field(ge=-MOST_REWARD, le=MOST_REWARD)]


class Rewarded(Body):
    """Of ``POST /v1/sessions/SESSION/reward``."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    reward: Reward
    """What the turn was worth; said again, it replaces what was said."""
    turn: Annotated[int, Field(strict=True, ge=0)] | Annotated[str, Field(max_length=256)] | None = None
    """Its number, or the id of the completion, response or message that told it; without it the newest answer."""


class Finished(Body):
    """Of ``POST /v1/sessions/SESSION/finish``."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    reward: Reward | None = None
    """How good it was, beside what single turns were worth; without any of it the run's reward functions say so."""
    metrics: dict[str, float] = {}
    """Whatever else the agent has measured; a step's metrics have the mean of each as ``agent/NAME``."""
    turn_rewards: dict[str, Reward] = {}
    """What single turns were worth, by number or id."""
    truncated: bool = False
    """It was cut off: there was no room, or no turn was left."""
    branches: Branches = "shared"
    """``own``: each branch is an answer of its own, worth what its own turns were."""


class Abandoned(Body):
    """Of ``POST /v1/sessions/SESSION/abandon``."""

    model_config = ConfigDict(extra="forbid")
    reason: str = Field("given up by its agent", max_length=1000)


class Tokens(Body):
    """Of ``POST /s/SESSION/v1/generate``."""

    model_config = ConfigDict(extra="forbid")
    tokens: Listed[Annotated[int, Field(ge=0, lt=2**31)]] = Field(min_length=1)
    """Everything before the answer."""
    max_tokens: int | None = Field(None, ge=1)
    again: bool = False
    """It was asked for before, and the answer did not arrive."""


def described(held: Held, base: str) -> dict[str, Any]:
    """A session, as an agent is told of it."""
    lease = held.work.lease
    task = lease.prompt.model_dump() | {"pictures": [data_url(picture) for picture in lease.prompt.pictures]}
    return {
        "session": held.id,
        "base_url": f"{base}/s/{held.id}/v1",
        "purpose": lease.purpose,
        "task": task,
        "group": lease.number,
        "place": held.session.place,
    }


def make_app(desk: Desk, model: str, access: Access) -> FastAPI:
    """The routes. Agents show keys as a bearer, or as Anthropic's ``x-api-key``."""
    app = FastAPI(
        title="Penstock gateway", responses=REFUSALS, docs_url=None, redoc_url=None,
        dependencies=[*map(Depends, SHOWN), Depends(_allowed(access))],
    )  # fmt: skip
    app.add_exception_handler(AgentError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _nowhere)
    app.add_exception_handler(Exception, _failed)
    largest = largest_body(desk.max_length, desk.config.pictures)
    app.add_middleware(Bodies, access=access, largest=largest, find=desk.find)
    if not access.required:
        app.add_middleware(OwnHost, names=frozenset({host_in(desk.config.advertise or "")}))
    app.include_router(_session_routes(desk))
    for routes in (model_routes(desk, model), openai_routes(desk, model), anthropic_routes(desk, model)):
        app.include_router(routes, prefix="/s/{session}", dependencies=[Depends(in_path)])
        app.include_router(routes)
    return app


def _allowed(access: Access) -> Callable[..., Awaitable[None]]:
    async def allowed(request: Request) -> None:
        who, request.state.session = let_in(access, shown_in(request.headers))
        WHO.set(who)
        PEER.set(f"http {request.client.host} {request.client.port}" if request.client else "")

    return allowed


def _session_routes(desk: Desk) -> APIRouter:
    routes = APIRouter(tags=["sessions"])

    @routes.post("/v1/sessions")
    async def open_session(wanted: Wanted, request: Request) -> dict[str, Any]:
        """The next task of the run that no agent has."""
        held = await desk.open(wanted.wait_s)
        if await request.is_disconnected():
            await desk.untaken(held)
            raise AgentError(499, "gone", "the agent has gone")
        return described(held, str(request.base_url).rstrip("/"))

    @routes.get("/v1/sessions")
    async def list_sessions() -> list[dict[str, Any]]:
        """Those that agents have."""
        return desk.rows()

    @routes.post("/v1/sessions/{session}/reward")
    async def reward(session: str, said: Rewarded) -> dict[str, Any]:
        """What one turn was worth."""
        turn = await desk.reward(session, said.reward, said.turn)
        return {"session": session, "turn": turn.number, "reward": turn.reward}

    @routes.post("/v1/sessions/{session}/finish")
    async def finish(session: str, said: Finished) -> dict[str, str]:
        """The agent is done."""
        how = said.metrics, said.turn_rewards, said.truncated, said.branches
        await desk.finish(session, said.reward, *how)
        return {"session": session, "state": "finished"}

    @routes.post("/v1/sessions/{session}/abandon")
    async def abandon(session: str, said: Abandoned) -> dict[str, str]:
        """The agent gives up: another may try."""
        await desk.abandon(await desk.find(session), said.reason)
        return {"session": session, "state": "abandoned"}

    @routes.post("/s/{session}/v1/generate")
    async def generate(session: str, asked: Tokens, request: Request) -> dict[str, Any]:
        """The policy's answer to tokens."""
        held = await desk.find(session)
        tokens = np.array(asked.tokens, np.int32)
        again = Asking(asked.again, had=[])
        turn = await heard(request, again, desk.generate(held, tokens, asked.max_tokens, asked=again))
        answer = turn.answer
        return {
            "turn": turn.number,
            "tokens": answer.tokens.tolist(),
            "logprobs": answer.logprobs.tolist(),
            "versions": answer.versions.tolist(),
            "finish": answer.finish,
        }

    return routes


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, AgentError)
    return JSONResponse(error.body, error.status, error.headers)


async def _invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    wrong = what_is_wrong(error.errors(), skip=1)  # all are of the body, the path or a header
    return JSONResponse(AgentError(422, "invalid_request", wrong).body, 422)


async def _nowhere(request: Request, error: Exception) -> JSONResponse:
    """What the framework itself refuses: a path that is none, or another method's."""
    assert isinstance(error, HTTPException)
    code, said = "invalid_request", str(error.detail)
    if error.status_code in (404, 405):
        code = "unknown_path"
        said = (
            f"there is no {request.method} {request.url.path[:200]} here: the base URL of OpenAI's clients is "
            "…/s/SESSION/v1, of Anthropic's …/s/SESSION, or both less /s/SESSION where the API key says it; "
            "GET /openapi.json has all paths"
        )
    return JSONResponse(AgentError(error.status_code, code, said).body, error.status_code, error.headers)


async def _failed(_request: Request, error: Exception) -> JSONResponse:
    """Uvicorn tells it again, with its trace."""
    return JSONResponse(AgentError(500, "failed", f"{type(error).__name__}: {error}").body, 500)
