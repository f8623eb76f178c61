"""An agent waits for the policy's answer: as long as it is there, and over a line that is kept open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import structlog
from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse

from penstock.services.gateway.chat import dumps
from penstock.services.gateway.errors import AgentError
from penstock.services.gateway.questions import Asking
from penstock.services.gateway.session import Turn

log = structlog.get_logger()

LOOK_S = 0.5
"""Between two looks at whether the agent is still there."""
SOON_S = 10.0
"""What goes wrong so soon is told by a status, and not in a stream."""
COMMENT_S = 5.0
ENGINE = "penstock-engine-ms"
"""The header that tells how long the rollout's engine had the turn; the slowest, of several."""
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "the answer; with stream, server-sent events", "content": {"text/event-stream": {}}}
}
Answer = TypeVar("Answer", Turn, list[Turn])


async def heard(request: Request, asked: Asking, answer: Coroutine[Any, Any, Answer]) -> Answer:
    """The answer, unless whoever ``asked`` has gone: then it is not waited for any more, nor counts as had."""
    task, gone = asyncio.ensure_future(answer), False
    while not (task.done() or gone):
        await asyncio.wait({task}, timeout=LOOK_S)
        gone = await request.is_disconnected()
    if gone:
        task.cancel()
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody's error any more
        asked.take_back()
        raise AgentError(499, "gone", "the agent has gone")
    return task.result()


async def answered(
    request: Request,
    asked: Asking,
    streamed: bool | None,
    answer: Coroutine[Any, Any, Answer],
    whole: Callable[[Answer], dict[str, Any]],
    events: Callable[[Answer], Iterator[str]],
) -> JSONResponse | StreamingResponse:
    """What the agent is told: ``whole``, or as ``events`` where it asked for them to be ``streamed``."""
    if streamed:
        return await _stream(request, asked, answer, events)
    found = await heard(request, asked, answer)
    slowest = max(turn.answer.engine_s for turn in (found if isinstance(found, list) else [found]))
    return JSONResponse(whole(found), headers={ENGINE: f"{slowest * 1000:.1f}"})


async def _stream(
    request: Request, asked: Asking, answer: Coroutine[Any, Any, Answer], events: Callable[[Answer], Iterator[str]]
) -> StreamingResponse:
    """Server-sent events. The answer comes at once, when the turn is durable; until then comments keep the line."""
    task = asyncio.ensure_future(heard(request, asked, answer))
    await asyncio.wait({task}, timeout=SOON_S)
    if task.done():
        task.result()

    async def lines() -> AsyncIterator[str]:
        said = time.monotonic()
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_S)
                if not task.done() and time.monotonic() - said > COMMENT_S:
                    said = time.monotonic()
                    yield ": the policy is at it\n\n"
            for line in events(task.result()):
                yield line
        except AgentError as error:
            yield f"event: error\ndata: {dumps(error.body)}\n\n"
        except Exception as error:  # the line would end without a word
            log.exception("an answer could not be streamed")
            failed = AgentError(500, "failed", f"{type(error).__name__}: {error}")
            yield f"event: error\ndata: {dumps(failed.body)}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")
