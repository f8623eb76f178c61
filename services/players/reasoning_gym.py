"""Tasks of reasoning-gym, made and scored here: https://github.com/open-thought/reasoning-gym."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from penstock.protocols.agent_client import AsyncAgentSession
from penstock.services.data import need
from penstock.services.data.config import ReasoningGymData
from penstock.services.players.base import Played, said_to

SCORE_S = 30.0


class ReasoningGymPlayer:
    """One question, one answer, the task set's own score. The row of the run's task says which question: it is the
    same for a group's sessions."""

    def __init__(self, config: ReasoningGymData) -> None:
        need("reasoning_gym", "reasoning-gym", "ENVIRONMENT")
        import reasoning_gym

        self._config = config
        self._tasks = reasoning_gym.create_dataset(config.task, size=config.size, seed=config.seed, **config.options)

    async def open(self) -> None:
        """See `Player.open`."""

    async def play(self, session: AsyncAgentSession) -> Played:
        """See `Player.play`."""
        entry = json.loads(json.dumps(self._tasks[session.task.index % self._config.size], default=str))
        system = [{"role": "system", "content": self._config.system}] if self._config.system else []
        asked: list[dict[str, Any]] = [*system, {"role": "user", "content": entry["question"] + self._config.suffix}]
        reply = await said_to(session, asked, None)
        if reply is None:
            return Played(0.0)
        answer = reply.text.strip()
        score = asyncio.to_thread(self._tasks.score_answer, answer=answer, entry=entry)
        return Played(float(await asyncio.wait_for(score, SCORE_S)))

    async def close(self) -> None:
        """See `Player.close`."""
