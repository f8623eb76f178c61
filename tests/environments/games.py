"""Environments that behave, and some that do not."""

from __future__ import annotations

import asyncio
import os
import time

import penstock


class Counting:
    """Answers with how many turns there were; over after ``turns``."""

    def __init__(self, turns: int = 2) -> None:
        self._turns, self._said = turns, 0

    def reset(self, prompt: penstock.Prompt) -> str | None:
        return f"begin {prompt.truth}=" if prompt.truth else None

    def step(self, answer: str) -> penstock.Turn:
        self._said += 1
        return penstock.Turn(f"turn {self._said}=", reward=0.5 * self._said, done=self._said == self._turns)


class Misbehaving:
    """Does what it is told; ``late``: in its second turn."""

    def step(self, answer: str) -> object:
        if answer == "raise":
            raise RuntimeError("no idea")
        if answer == "hang":
            time.sleep(60)
        if answer == "crash":
            os._exit(3)
        wrong = {"nan": penstock.Turn("x", float("nan")), "list": [1], "silent": penstock.Turn(), "text": "go on"}
        return wrong.get(answer, penstock.Turn("well=", 1.0))


class Waiting:
    """Async: all wait at once."""

    async def reset(self, prompt: penstock.Prompt) -> list[dict[str, str]]:
        await asyncio.sleep(0.2)
        return [{"role": "user", "content": prompt.as_text()}]

    async def step(self, answer: str) -> str | None:
        await asyncio.sleep(60 if answer == "hang" else 0.2)
        return "go on" if answer != "done" else None


class NeedsMore:
    def __init__(self, size: int) -> None: ...

    def step(self, answer: str) -> None: ...


class Stepless:
    pass


def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


async def look_up(word: str) -> dict[str, str]:
    """What a word means."""
    if word == "nothing":
        raise KeyError(word)
    return {"word": word}


class Wordy:
    """Says much at once."""

    def reset(self, prompt: penstock.Prompt) -> str:
        return "a" * 20_000

    def step(self, answer: str) -> object:
        return penstock.Turn("x", 1e39) if answer == "huge" else "\ud800"


class Leaving:
    """Async; ends the process, or tries to."""

    async def step(self, answer: str) -> str:
        if answer == "leave":
            raise SystemExit(3)
        await asyncio.sleep(0.2)
        return "go on"


def stuck() -> str:
    """A tool that never answers."""
    time.sleep(600)
    return ""
