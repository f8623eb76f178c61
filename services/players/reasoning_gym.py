"""Tasks of reasoning-gym, made and scored here: https://github.com/open-thought/reasoning-gym."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.protocols.agent_client import AsyncAgentSession
from penstock.services.data.config import ReasoningGymData
from penstock.services.data.reasoning_gym import ReasoningGymSource
from penstock.services.players.base import Played, PlayError, as_messages, said_to
from penstock.services.user_processes.pool import WorkerPool
from penstock.services.user_processes.worker import Call, Program

KEY = "ENVIRONMENT"
SCORE_S = 30.0
AHEAD = 64
"""Answers that the process has at once."""


class Scorer:
    """A `user_processes.child.Handler`: what a task set's own scorer says of answers, some of which it computes."""

    is_async = False
    asks = ["answer", "index"]

    def __init__(self, program: dict[str, Any]) -> None:
        self.timeout_s: float = program["timeout_s"]
        self._tasks = ReasoningGymSource(ReasoningGymData.model_validate(program["options"]), KEY)

    def start(self, arguments: dict[str, Any]) -> float:
        """Of an answer to the task of an index."""
        return self._tasks.score(arguments["answer"], self._tasks.prompt(arguments["index"]))

    def answer(self, value: float) -> dict[str, Any]:
        """See `child.Handler`."""
        return {"value": value}


class ReasoningGymPlayer:
    """One question, one answer, the task set's own score, by a process of its own: ``9**9**9**9`` costs its session
    alone. The row of the run's task says which question: it is the same for a group's sessions. Raises `ValueError`."""

    def __init__(self, config: ReasoningGymData) -> None:
        if "chat" in config.model_fields_set and not config.chat:
            raise ValueError("chat=false: a session is a conversation, and asks no question as bare text; leave it out")
        self._tasks, self._config = ReasoningGymSource(config, KEY), config
        self._pool: WorkerPool | None = None

    async def open(self) -> None:
        """See `Player.open`."""
        options = self._config.model_dump(mode="json")
        program = Program("penstock.services.players.reasoning_gym:Scorer", self._config.task, KEY, SCORE_S, options)
        self._pool = await asyncio.to_thread(WorkerPool, program, 1, AHEAD)

    async def play(self, session: AsyncAgentSession) -> Played:
        """See `Player.play`."""
        assert self._pool
        index = session.task.index % len(self._tasks)
        reply = await said_to(session, as_messages(self._tasks.prompt(index)), None)
        if reply is None:
            return Played(0.0, truncated=True)
        try:
            return Played(await asyncio.wrap_future(self._pool.submit(Call({"answer": reply.text, "index": index}))))
        except Exception as error:
            raise PlayError(f"its answer cannot be scored: it {error}") from error

    async def close(self) -> None:
        """See `Player.close`."""
        if self._pool:
            await asyncio.to_thread(self._pool.close)
