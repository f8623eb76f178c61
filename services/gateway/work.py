"""What a gateway holds: groups, and the sessions of them that agents have."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.protocols.experience import Purpose
from penstock.protocols.messages import Lease
from penstock.services.gateway.questions import Questions
from penstock.services.gateway.session import Session, Turn

Key = tuple[Purpose, int]
"""Purpose and number of a group."""


@dataclass(eq=False)
class Work:
    """A group that agents are at."""

    lease: Lease
    prompt: np.ndarray
    sessions: list[Session]

    @property
    def key(self) -> Key:
        """Purpose and number."""
        return self.lease.purpose, self.lease.number


@dataclass(eq=False)
class Held:
    """A session in an agent's hands, by what the agent calls it."""

    id: str
    work: Work
    session: Session
    life: int
    owner: str = ""
    """The name of the key that its agent came in by; empty: none was needed, or the owner's."""
    touched: float = field(default_factory=time.monotonic)
    """When its agent last asked for something; and when the client that has it was last heard, None where nobody has
    said that he would be."""
    heard: float | None = None
    questions: Questions = field(default_factory=Questions)
    error: str = ""
    """The last thing that went wrong."""

    def note(self, task: asyncio.Task[Turn]) -> None:
        """A question has its answer, or never will."""
        self.touched = time.monotonic()
        if not task.cancelled() and (error := task.exception()):
            self.error = str(error)

    def row(self) -> dict[str, Any]:
        """For people."""
        turns = self.session.turns.values()
        return {
            "session": self.id,
            "key": self.owner,
            "turns": len(turns),
            "tokens": sum(len(turn.given) + len(turn.answer.tokens) for turn in turns),
            "waiting": self.questions.pending,
            "silent_s": round(time.monotonic() - self.touched, 1),
            "error": self.error,
        }
