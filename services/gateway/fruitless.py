"""Agents that give sessions up before they have asked for a turn, since a tool is missing, say: they wait before their
next one, or they would take, and spoil, whatever becomes free while the others are at work."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar

from penstock.services.gateway.errors import AgentError

PEER: ContextVar[str] = ContextVar("PEER", default="")
"""Whose request is being answered, as the door tells him from others; empty: nobody's."""
FIRST_S, MOST_S = 0.5, 60.0
"""After the first such session; twice as long after each more, up to this."""
REMEMBERED = 4096


class Fruitless:
    """By peer, how many such sessions there were in a row, and until when it waits."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def gave_up(self, peer: str, had_turns: bool) -> None:
        """One more session, of which it ``had_turns`` or none."""
        if not peer or had_turns:
            return
        before, _ = self._known.pop(peer, (0, 0.0))
        self._known[peer] = before + 1, time.monotonic() + min(MOST_S, FIRST_S * 2 ** min(before, 16))
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def had_turn(self, peer: str) -> None:
        """It can do its work."""
        self._known.pop(peer, None)

    async def wait(self, peer: str, deadline: float, over: Callable[[], bool]) -> None:
        """Until it may have another, or the run is ``over``. Raises `AgentError` where that is behind the
        ``deadline``."""
        while (until := self._known.get(peer, (0, 0.0))[1]) > (now := time.monotonic()) and not over():
            if now >= deadline:
                why = "the last sessions that you had were given up before a turn was asked for"
                raise AgentError(503, "no_session", f"{why}; ask again", min(MOST_S, until - now))
            await asyncio.sleep(min(until, deadline, now + 1.0) - now)
