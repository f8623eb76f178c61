"""Agents that are not heard of any more: their sessions are for others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import structlog

from penstock.services.gateway.config import GatewayConfig
from penstock.services.gateway.work import Held
from penstock.services.runtime import health

log = structlog.get_logger()

AGAIN_S = 10.0
"""What cannot be given up now is tried again after so long."""


class Silence:
    """Looked at every second or so. ``abandon`` gives a session on, for a reason."""

    def __init__(self, config: GatewayConfig, abandon: Callable[[Held, str], Coroutine[Any, Any, None]]) -> None:
        self._config, self._abandon = config, abandon
        self._looked_at = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()

    def look(self, every: Iterable[Held]) -> None:
        """Gives up those whose agents are silent. While this process was away the silence was its own: what agents have
        said meanwhile is not read yet."""
        now = time.monotonic()
        passed, self._looked_at = now - self._looked_at, now
        for held in every:
            if passed > health.AWAY_S:
                held.touched, held.turned = held.touched + passed, held.turned + passed
                held.heard = None if held.heard is None else now
            if reason := held.lost(self._config):
                beats, held.touched, held.heard = held.heard is not None, now, None
                task = asyncio.ensure_future(self._give_up(held, reason, beats))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _give_up(self, held: Held, reason: str, beats: bool) -> None:
        """Where the broker could not be told of it, it is tried again."""
        try:
            await self._abandon(held, reason)
        except Exception as error:
            log.warning("a session could not be given up yet", session=held.id, error=str(error))
            held.heard = time.monotonic() if beats else None
            held.turned += AGAIN_S
