"""What a gateway holds: groups, and the sessions of them that agents have."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.protocols.experience import Group, Purpose
from penstock.protocols.messages import Lease
from penstock.services.gateway.access import WHO
from penstock.services.gateway.config import GatewayConfig
from penstock.services.gateway.questions import Questions
from penstock.services.gateway.session import Session, Turn

Key = tuple[Purpose, int]
"""Purpose and number of a group."""
REMEMBERED = 10_000
"""Sessions that have ended."""


@dataclass(eq=False)
class Work:
    """A group that agents are at."""

    lease: Lease
    prompt: np.ndarray
    sessions: list[Session]
    files: dict[str, bytes] = field(default_factory=dict)
    """By digest, the pictures that the broker keeps, of all sessions."""
    keeping: asyncio.Lock = field(default_factory=asyncio.Lock)
    """For whoever has it keep more."""

    @property
    def key(self) -> Key:
        """Purpose and number."""
        return self.lease.purpose, self.lease.number

    def group(self, decode: Callable[[Sequence[int]], str]) -> Group:
        """What its sessions have come to, all of which have ended. Raises `ValueError` where an engine's numbers break
        a trajectory's rules."""
        n, shown = self.lease.sampling.n, self.lease.prompt.pictures
        made = [
            each
            for session in self.sessions
            for each in session.trajectories(decode, self.prompt, session.place == n, shown)
        ]
        return Group(self.lease.number, self.lease.prompt, made)


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
    turned: float = field(default_factory=time.monotonic)
    """When it began, or its last turn ended."""
    taken: bool = True
    """Its agent may know of it. A client that says that it is alive says so of each session that it has."""
    questions: Questions = field(default_factory=Questions)
    _saying: asyncio.Lock = field(default_factory=asyncio.Lock)
    error: str = ""
    """The last thing that went wrong."""

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """For whoever rewards or ends the session, or has another begin it anew: what was said first is done first. Its
        agent waits for this."""
        async with self._saying:
            try:
                yield
            finally:
                self.touched = time.monotonic()

    def note(self, task: asyncio.Task[Turn]) -> None:
        """A question has its answer, or never will."""
        self.touched = self.turned = time.monotonic()
        if not task.cancelled() and (error := task.exception()):
            self.error = str(error)

    def lost(self, config: GatewayConfig) -> str:
        """Why another is to have it; empty: it is in good hands. A client that says that it is alive may be silent
        else, as long as its tools take."""
        now = time.monotonic()
        if self._saying.locked():
            return ""
        if config.session_s and self.turned < now - config.session_s and not self.questions.pending:
            return f"its agent asked for no turn for gateway.session_s={config.session_s:g} s"
        if self.heard is not None:
            silent = f"nothing was heard of its client for gateway.lost_s={config.lost_s:g} s"
            return silent if self.heard < now - config.lost_s else ""
        if self.touched < now - config.idle_s and not self.questions.pending:
            return f"its agent was silent for gateway.idle_s={config.idle_s:g} s"
        return ""

    def given_on_s(self, config: GatewayConfig) -> float | None:
        """Seconds until another is to have it, if nothing more is heard; None: never, as its agent waits for us."""
        ends = [self.heard + config.lost_s] if self.heard is not None else []
        if not self.questions.pending:
            ends += [self.touched + config.idle_s] if self.heard is None else []
            ends += [self.turned + config.session_s] if config.session_s else []
        return min(ends) - time.monotonic() if ends else None

    def row(self, config: GatewayConfig) -> dict[str, Any]:
        """For people."""
        left = self.given_on_s(config)
        turns = self.session.turns.values()
        return {
            "session": self.id,
            "key": self.owner,
            "turns": len(turns),
            "tokens": sum(len(turn.given) + len(turn.answer.tokens) for turn in turns),
            "by": "HTTP" if self.heard is None else "AgentClient",
            "waiting": self.questions.pending,
            "silent_s": round(time.monotonic() - self.touched, 1),
            "given_on_s": None if left is None else round(max(0.0, left), 1),
            "error": self.error,
        }


class Ended:
    """Sessions that have ended, and whose they were: the last `REMEMBERED`."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, str] = OrderedDict()

    def __contains__(self, id: str) -> bool:
        return id in self._owners

    def heard_of(self, id: str) -> bool:
        """This one has, and it is his to speak of who asks."""
        return id in self and WHO.get().sees(self._owners[id])

    def add(self, id: str, owner: str) -> None:
        """It has ended now, or at a gateway before this one."""
        self._owners[id] = owner
        while len(self._owners) > REMEMBERED:
            self._owners.popitem(last=False)
