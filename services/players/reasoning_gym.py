"""Tasks of reasoning-gym, made and scored here: https://github.com/open-thought/reasoning-gym."""

from __future__ import annotations

import asyncio

from penstock.protocols.agent_client import AsyncAgentSession
from penstock.services.data.config import ReasoningGymData
from penstock.services.data.reasoning_gym import ReasoningGymSource
from penstock.services.players.base import Played, as_messages, said_to

SCORE_S = 30.0


class ReasoningGymPlayer:
    """One question, one answer, the task set's own score. The row of the run's task says which question: it is the
    same for a group's sessions."""

    def __init__(self, config: ReasoningGymData) -> None:
        self._tasks = ReasoningGymSource(config, "ENVIRONMENT")

    async def open(self) -> None:
        """See `Player.open`."""

    async def play(self, session: AsyncAgentSession) -> Played:
        """See `Player.play`."""
        asked = self._tasks.prompt(session.task.index % len(self._tasks))
        reply = await said_to(session, as_messages(asked), None)
        if reply is None:
            return Played(0.0)
        score = asyncio.to_thread(self._tasks.score, reply.text, asked)
        return Played(await asyncio.wait_for(score, SCORE_S))

    async def close(self) -> None:
        """See `Player.close`."""
