"""What OpenAI's clients ask for: chat completions, completions, responses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import JSONResponse, StreamingResponse

from penstock.services.gateway import chat, completions, responses
from penstock.services.gateway.address import Session
from penstock.services.gateway.desk import Desk
from penstock.services.gateway.formats import Form
from penstock.services.gateway.questions import Ask, Asking
from penstock.services.gateway.session import Turn
from penstock.services.gateway.waiting import STREAMED, answered
from penstock.services.gateway.work import Held
from penstock.services.turns.tool_calls import aloud


async def _asking(
    retried: Annotated[int, Header(alias="x-stainless-retry-count", ge=0)] = 0,
    key: Annotated[str, Header(alias="Idempotency-Key", max_length=256)] = "",
) -> Asking:
    """OpenAI's and Anthropic's own clients say how often they have asked this before; others may name what they ask."""
    return Asking(retried > 0, key, had=[])


Asked = Annotated[Asking, Depends(_asking)]
"""How a request is known that was made before."""


def openai_routes(desk: Desk, model: str) -> APIRouter:
    """``model``: what the policy is called."""
    routes, replies = APIRouter(prefix="/v1", tags=["OpenAI"]), desk.replies

    @routes.post("/chat/completions", response_model=None, responses=STREAMED)
    async def chat_completions(
        session: Session, asked: chat.ChatRequest, request: Request, again: Asked
    ) -> JSONResponse | StreamingResponse:
        """Chat completions."""
        held, talk = await desk.find(session), asked.talk
        form = await desk.forms.read(asked.form)
        ask = desk.chats(held, talk, asked.most, asked.stops, asked.calls)
        answers = several(asked.count, ask, again, asked.stream)
        return await answered(
            request,
            again,
            asked.stream,
            judged(form, answers),
            lambda turns: chat.completion(held.id, model, turns, replies, asked, form),
            lambda turns: chat.chunks(held.id, model, turns, replies, asked, form),
        )

    @routes.post("/completions", response_model=None, responses=STREAMED)
    async def text_completions(
        session: Session, asked: completions.CompletionRequest, request: Request, again: Asked
    ) -> JSONResponse | StreamingResponse:
        """Completions of text, or of token ids."""
        held = await desk.find(session)
        return await answered(
            request,
            again,
            asked.stream,
            several(asked.count, _completes(desk, held, asked), again, asked.stream),
            lambda turns: completions.completion(held.id, model, turns, replies, asked),
            lambda turns: completions.chunks(held.id, model, turns, replies, asked),
        )

    @routes.post("/responses", response_model=None, responses=STREAMED)
    async def create_response(
        session: Session, asked: responses.ResponsesRequest, request: Request, again: Asked
    ) -> JSONResponse | StreamingResponse:
        """Responses."""
        held = await desk.find(session)
        talk, form = asked.talk(held.id, held.session), await desk.forms.read(asked.form)
        ask = desk.chats(held, talk, asked.max_output_tokens, calls=asked.calls)
        answers = _instructed(held, asked.instructions, several(1, ask, again, asked.stream))
        return await answered(
            request,
            again,
            asked.stream,
            judged(form, answers),
            lambda turns: responses.response(held.id, model, turns[0], replies, asked, form),
            lambda turns: responses.events(held.id, model, turns[0], replies, asked, form),
        )

    return routes


async def several(count: int, ask: Ask, asked: Asking, streamed: bool | None) -> list[Turn]:
    """So many answers to one request, which are to be ``streamed`` or not."""
    same = asked._replace(together=asyncio.Barrier(count), streamed=bool(streamed))
    each = [same._replace(which=which) for which in range(count)]
    tasks = [asyncio.ensure_future(ask(one)) for one in each]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:  # where one has failed, nobody hears the others
            task.cancel()


async def judged(form: Form | None, answers: Coroutine[Any, Any, list[Turn]]) -> list[Turn]:
    """The ``answers``, once it is known whether they have the ``form``."""
    turns = await answers
    if form:
        await form.judge([aloud(turn.message["content"]) for turn in turns])
    return turns


async def _instructed(held: Held, words: str | None, answers: Coroutine[Any, Any, list[Turn]]) -> list[Turn]:
    """The ``answers``, once it is noted which ``words`` they were told as instructions."""
    turns = await answers
    if words is not None and held.life == held.session.life:
        held.session.instruct(words)
    return turns


def _completes(desk: Desk, held: Held, asked: completions.CompletionRequest) -> Ask:
    if isinstance(asked.prompt, str):
        return desk.completes(held, asked.prompt, asked.max_tokens, asked.stops)
    tokens = np.array(asked.prompt, np.int32)
    return lambda each: desk.generate(held, tokens, asked.max_tokens, asked.stops, each)
