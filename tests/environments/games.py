"""Environments that behave, and some that do not."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from pathlib import Path

import penstock


class Counting:
    """Answers with how many turns there were; over after ``turns``."""

    def __init__(self, turns: int = 2) -> None:
        self._turns, self._said = turns, 0

    def reset(self, prompt: penstock.Prompt) -> str | None:
        return f"begin {prompt.truth}=" if prompt.truth else None

    def step(self, answer: str) -> penstock.Turn:
        self._said += 1
        metrics = {"said": 1.0, f"turn_{self._said}": 0.5}
        done = self._said == self._turns
        return penstock.Turn(f"turn {self._said}=", reward=0.5 * self._said, done=done, metrics=metrics)


class Told:
    """Gives 1 for each turn that was cut off; over after three."""

    def __init__(self) -> None:
        self._turns = 0

    def step(self, answer: str, finish_reason: str) -> penstock.Turn:
        self._turns += 1
        return penstock.Turn("on=", reward=float(finish_reason == "length"), done=self._turns == 3)


class Measuring:
    """As much each turn as a float can hold; over after two."""

    def __init__(self) -> None:
        self._turns = 0

    def step(self, answer: str) -> penstock.Turn:
        self._turns += 1
        return penstock.Turn("on=", reward=1.0, done=self._turns == 2, metrics={"size": 1e308})


class Misbehaving:
    """Does what it is told."""

    def __init__(self) -> None:
        self._turns = 0

    def step(self, answer: str) -> object:
        self._turns += 1
        if answer == "raise":
            raise RuntimeError("no idea")
        if answer == "hang":
            time.sleep(60)
        if answer == "crash":
            os._exit(3)
        wrong = {"nan": penstock.Turn("x", float("nan")), "list": [1], "silent": penstock.Turn(), "text": "go on"}
        wrong["measure"] = penstock.Turn("x", metrics={"no/name": 1.0})
        return (wrong | {"pid": str(os.getpid())}).get(answer, penstock.Turn(f"well= {self._turns}", 1.0))


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


def hint(place: int, task: penstock.Prompt) -> str:
    """A letter of the truth."""
    return task.truth[place]


def executed(parameters: dict) -> tuple[str, float, dict]:
    """Returns what one of verl's tools does."""
    return "found", 0.5, {"calls": 1}


def stuck() -> str:
    """A tool that never answers."""
    time.sleep(600)
    return ""


class Late:
    """Async; ``tools`` are there once reset has waited. Does what it is told."""

    async def reset(self, prompt: penstock.Prompt) -> None:
        await asyncio.sleep(0)
        self.tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]

    async def step(self, answer: str) -> str:
        if answer == "cancelled":
            waited = asyncio.ensure_future(asyncio.sleep(9))
            waited.cancel()
            await waited
        if answer == "its own timeout":
            async with asyncio.timeout(0.01):
                await asyncio.sleep(9)
        return "go on"


class Numbered:
    """Tools that JSON has not; ``table``: options."""

    def __init__(self, table: dict[str, float] | None = None) -> None: ...

    def reset(self, prompt: penstock.Prompt) -> None:
        if prompt.index == 7:
            self.tools = [{"type": "function", "function": {"name": "look", "parameters": {1: "x"}}}]

    def step(self, answer: str) -> str:
        return "go on"


class Sandbox:
    """Tells a file when it is opened and closed."""

    def __init__(self, told: str) -> None:
        self._told = told

    def reset(self, prompt: penstock.Prompt) -> None:
        self._tell("opened")

    def step(self, answer: str) -> str:
        return "go on"

    def close(self) -> None:
        self._tell("closed")

    def _tell(self, word: str) -> None:
        with Path(self._told).open("a") as file:
            file.write(f"{word}\n")


class AsyncSandbox(Sandbox):
    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0.1)
        self._tell("closed")


class Long:
    """Says very much: at once, or after its first turn."""

    def reset(self, prompt: penstock.Prompt) -> str | None:
        return "a" * 1_000_000 if prompt.truth == "long" else None

    def step(self, answer: str) -> penstock.Turn:
        return penstock.Turn("a" * 1_000_000, reward=0.5)


class Silent:
    """Its methods are tools; of a reward it says nothing."""

    def add(self, step: int) -> int:
        """Adds to the counter."""
        self.count = getattr(self, "count", 0) + step
        return self.count


class Adding(Silent):
    """Has to count to its row's target, and to no number above ``limit``."""

    def __init__(self, limit: int = 9) -> None:
        self._limit, self.count = limit, 0

    def reset(self, target: int, task: penstock.Prompt, **row: object) -> str:
        assert row == {"prompt": "count"} and task.truth == {"prompt": "count", "target": target}
        self._target = target
        return f" to {target}"

    def add(self, step: int) -> int:
        """Adds to the counter."""
        if step < 0:
            os._exit(3)
        before = self.count
        time.sleep(0.02)  # another call may not come in between
        if before + step > self._limit:
            raise ValueError("too much")
        self.count = before + step
        return self.count

    def double(self, task: penstock.Prompt) -> str:
        """Doubles the counter."""
        asyncio.run(asyncio.sleep(0))  # there is no other loop in the way
        self.count *= 2
        return f"{self.count} of {task.truth['target']}"

    def get_reward(self) -> float:
        return 1.0 if self.count == self._target else self.count / 100

    def _hidden(self) -> None: ...


class AsyncAdding(Adding):
    async def double(self, task: penstock.Prompt) -> str:  # type: ignore[override]
        """Doubles the counter."""
        self.count *= 2
        return f"{self.count} of {task.truth['target']}"


class Empty:
    def reset(self) -> None: ...


class Unexplained:
    def go(self) -> None: ...


def pairs(text: str) -> dict[tuple[str, str], int]:
    """Counts pairs of letters."""
    return dict.fromkeys(itertools.pairwise(text), 1)


def half(text: str) -> str:
    """Half of a surrogate pair."""
    return "\ud83d"


def overlook(text: str) -> str:
    """A tool whose name a server's tool may take."""
    return text


class Secret:
    """Thinks of a number; `right` of a prompt's own."""

    def __init__(self, right: bool) -> None:
        self._right = right

    def reset(self, prompt: penstock.Prompt) -> None:
        self._secret = random.Random(prompt.index if self._right else None).random()

    def step(self, answer: str) -> penstock.Turn:
        if "42" in answer and self._right:
            raise KeyError("no number")
        return penstock.Turn(f"it is {self._secret}")
