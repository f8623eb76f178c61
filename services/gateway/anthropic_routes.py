"""What Anthropic's clients ask for: messages, and how many tokens they have."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, StreamingResponse

from penstock.services.gateway import messages
from penstock.services.gateway.address import Session
from penstock.services.gateway.desk import Desk
from penstock.services.gateway.openai_routes import Asked
from penstock.services.gateway.waiting import STREAMED, answered


def anthropic_routes(desk: Desk, model: str) -> APIRouter:
    """``model``: what the policy is called."""
    routes = APIRouter(prefix="/v1/messages", tags=["Anthropic"])

    @routes.post("", response_model=None, responses=STREAMED)
    async def create(
        session: Session, asked: messages.MessagesRequest, request: Request, again: Asked
    ) -> JSONResponse | StreamingResponse:
        """Messages."""
        held = await desk.find(session)
        return await answered(
            request,
            asked.stream,
            desk.chat(held, asked.said(), asked.functions(), asked.max_tokens, asked.stop_sequences, again),
            lambda turn: messages.message(held.id, model, turn),
            lambda turn: messages.events(held.id, model, turn),
        )

    @routes.post("/count_tokens")
    async def count(session: Session, asked: messages.CountRequest) -> dict[str, int]:
        """How many tokens a conversation begins with."""
        return {"input_tokens": desk.count(await desk.find(session), asked.said(), asked.functions())}

    return routes
