"""What clients of OpenAI and of Anthropic ask about models: there is one, the policy."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from penstock.services.gateway.address import Session
from penstock.services.gateway.desk import Desk
from penstock.services.gateway.errors import AgentError


def model_routes(desk: Desk, model: str) -> APIRouter:
    """``model``: what the policy is called."""
    routes = APIRouter(prefix="/v1/models", tags=["models"])
    openais = {"object": "model", "created": 0, "owned_by": "penstock"}
    policy = {"id": model, **openais, "type": "model", "display_name": model, "created_at": "1970-01-01T00:00:00Z"}

    @routes.get("")
    async def models(session: Session) -> dict[str, Any]:
        """The policy."""
        await desk.find(session)
        return {"object": "list", "data": [policy], "has_more": False, "first_id": model, "last_id": model}

    @routes.get("/{name:path}")
    async def one_model(session: Session, name: str) -> dict[str, Any]:
        """The policy, by its name."""
        await desk.find(session)
        if name != model:
            raise AgentError(404, "model_not_found", f"there is no model {name[:80]!r} here, but {model!r} alone")
        return policy

    return routes
