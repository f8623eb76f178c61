"""Environments that the players' tests play."""

from __future__ import annotations

import penstock


class Twice:
    """Two turns, each worth half as much as it is long; the second observation says what was heard."""

    def __init__(self, worth: float = 0.5) -> None:
        self._worth, self._turns = worth, 0

    def reset(self, prompt: penstock.Prompt) -> str | None:
        self._index = prompt.index
        return None if prompt.index % 2 else "sort ba="

    def step(self, answer: str) -> penstock.Turn:
        self._turns += 1
        if self._index == 3:
            raise KeyError("no idea")
        return penstock.Turn("more", reward=self._worth, done=self._turns == 2)


class Endless:
    """Is never done."""

    async def step(self, answer: str) -> penstock.Turn:
        return penstock.Turn("and then ba=", reward=1.0)
