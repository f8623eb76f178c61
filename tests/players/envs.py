"""Environments that the players' tests play."""

from __future__ import annotations

import os
from pathlib import Path

import penstock
from tests import shown


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
        return penstock.Turn("more", reward=self._worth, done=self._turns == 2, metrics={"seen": 1.0})


class Endless:
    """Is never done."""

    async def step(self, answer: str) -> penstock.Turn:
        return penstock.Turn("and then ba=", reward=1.0)


class Closing:
    """Tells a file of its end; in some tasks it cannot begin."""

    def __init__(self, told: str) -> None:
        self._told = told

    def reset(self, prompt: penstock.Prompt) -> None:
        if prompt.index == 1:
            raise KeyError("no idea")

    def step(self, answer: str) -> penstock.Turn:
        return penstock.Turn(reward=1.0, done=True)

    def close(self) -> None:
        with Path(self._told).open("a") as file:
            file.write("closed\n")


class Deadly:
    """Kills its process at the third turn of some tasks."""

    def reset(self, prompt: penstock.Prompt) -> None:
        self._index, self._turns = prompt.index, 0

    def step(self, answer: str) -> penstock.Turn:
        self._turns += 1
        if self._index == 1 and self._turns == 3:
            os._exit(1)
        return penstock.Turn("more", reward=0.25, done=self._turns == 4)


class Shown:
    """Shows a picture first, and another after each answer."""

    def __init__(self) -> None:
        self._turns = 0

    def reset(self, prompt: penstock.Prompt) -> penstock.Turn:
        return penstock.Turn("is <image> red", pictures=[shown.picture(shown.COLOURS["r"])])

    def step(self, answer: str) -> penstock.Turn:
        self._turns += 1
        return penstock.Turn("and", reward=1.0, done=self._turns == 2, pictures=[shown.picture(shown.COLOURS["g"])])
