"""What Anthropic's clients ask for: messages, and how many tokens they have."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, StreamingResponse

from penstock.services.gateway import messages
from penstock.services.gateway.access import WHO
from penstock.services.gateway.address import Session
from penstock.services.gateway.desk import Desk
from penstock.services.gateway.openai_routes import Asked, judged, several
from penstock.services.gateway.waiting import STREAMED, answered


def anthropic_routes(desk: Desk, model: str) -> APIRouter:
    """``model``: what the policy is called."""
    routes = APIRouter(prefix="/v1/messages", tags=["Anthropic"])

    @routes.post("", response_model=None, responses=STREAMED)
    async def create(
        session: Session, asked: messages.MessagesRequest, request: Request, again: Asked
    ) -> JSONResponse | StreamingResponse:
        """Messages."""
        held, form = await desk.find(session), await desk.forms.read(asked.form)
        about = asked.talk, asked.max_tokens, asked.stop_sequences or (), asked.calls
        return await answered(
            request,
            again,
            asked.stream,
            judged(form, several(1, desk.chats(held, *about), again, asked.stream)),
            lambda turns: messages.message(held.id, model, turns[0], form),
            lambda turns: messages.events(held.id, model, turns[0], form),
        )

    @routes.post("/count_tokens")
    async def count(session: Session, asked: messages.CountRequest) -> dict[str, int]:
        """How many tokens a conversation begins with."""
        held = await desk.find(session)
        WHO.get().take_turn()  # it takes the gateway as long
        return {"input_tokens": desk.count(held, asked.talk)}

    return routes
