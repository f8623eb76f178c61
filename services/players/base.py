"""What a player is: an environment that plays sessions, as many at once as it is asked to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.protocols.agent_client import AgentRefusedError, AsyncAgentSession, Reply
from penstock.protocols.experience import PICTURE, Prompt
from penstock.services.data.pictures import in_parts as parts_of

NO_ROOM = {"context_length_exceeded", "too_many_turns"}
"""What ends a task that has gone on for too long."""


class PlayError(RuntimeError):
    """A session that this environment cannot play to its end: another may try. Says why."""


@dataclass(frozen=True)
class Played:
    """What came of a session."""

    reward: float | None = None
    """Beside what its turns were worth; None: the run's reward functions judge."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Mapping[int | str, float] = field(default_factory=dict)
    """What turns were worth, by `Reply.turn`."""
    truncated: bool = False
    """There was no room for another turn, or none was left."""

    @property
    def total(self) -> float | None:
        """Of the session."""
        return None if self.reward is None else math.fsum([self.reward, *self.turn_rewards.values()])


class Player(Protocol):
    """An environment."""

    async def open(self) -> None:
        """Before the first session."""

    async def play(self, session: AsyncAgentSession) -> Played:
        """One session, from its task to its end. Raises `PlayError`; whatever else it raises costs the session too."""

    async def close(self) -> None:
        """Ends what it has begun."""


async def said_to(
    session: AsyncAgentSession, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> Reply | None:
    """The policy's answer; None where the conversation has no room for one."""
    try:
        return await session.chat(messages, tools)
    except AgentRefusedError as refused:
        if refused.code in NO_ROOM:
            return None
        raise


def as_messages(task: Prompt) -> list[dict[str, Any]]:
    """A task as a conversation."""
    if task.messages is not None:
        return in_parts(task.messages, task.pictures)
    return in_parts([{"role": "user", "content": task.as_text()}], task.pictures)


def in_parts(messages: Sequence[Mapping[str, Any]], pictures: Sequence[bytes]) -> list[dict[str, Any]]:
    """``messages`` as a session is asked: where ``pictures`` stand by their marks, as many as there are, in parts."""
    left, found = iter(pictures), []
    for message in messages:
        content: Any = message["content"]
        if pictures and PICTURE in (content or ""):
            content = [{**part, "image": next(left)} if part["type"] == "image" else part for part in parts_of(content)]
        found.append({**message, "content": content})
    return found
