"""How long turns take, and how much of that the engine has them."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from typing import Any

from penstock.services.gateway.session import Turn


class TurnTimes:
    """Of the turns since the last look."""

    def __init__(self) -> None:
        self._took: list[tuple[float, float]] = []
        """Seconds that each took, and of these in the engine."""

    async def timed(self, answer: Coroutine[Any, Any, Turn]) -> Turn:
        """The answer, counted."""
        began = time.monotonic()
        turn = await answer
        self._took.append((time.monotonic() - began, turn.answer.engine_s))
        return turn

    def means(self) -> dict[str, float]:
        """In seconds; nothing where there was no turn."""
        took, self._took = self._took, []
        means = [sum(each) / len(took) for each in zip(*took, strict=True)]
        return dict(zip(("turn_s", "turn_engine_s"), means, strict=False))
