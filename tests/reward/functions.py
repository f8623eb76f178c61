"""Reward functions that misbehave, wait, or want much."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

LIMIT = asyncio.Semaphore(3)
"""A module's own: bound to the first event loop that waits for it."""
CLIENT = httpx.AsyncClient()
at_once = most_at_once = 0


class Panic(BaseException):
    """As extensions in other languages raise them: no Exception."""


class WithoutWords(Exception):
    """Its message cannot be formatted."""

    def __str__(self) -> str:
        return self.args[0]  # a map


def good(response: str, truth: Any, prompt: str, bonus: float = 0.0) -> float:
    print("a function may print")
    return float(response == truth) + bonus


def misbehaving(response: str, truth: Any, prompt: str) -> Any:
    match response:
        case "raise":
            raise RuntimeError("no idea")
        case "hang":
            time.sleep(1000)
        case "crash":
            os._exit(3)
        case "nan":
            return float("nan")
        case "text":
            return "high"
    return 1.0


async def slow(response: str) -> float:
    await asyncio.sleep(1000 if response == "hang" else 0.3)
    return 1.0


async def misbehaving_async(response: str) -> Any:
    await asyncio.sleep(0.05)
    match response:
        case "raise":
            raise RuntimeError("no idea")
        case "hang":
            await asyncio.sleep(1000)
        case "block":
            time.sleep(1000)
        case "crash":
            os._exit(4)
        case "slow":
            await asyncio.sleep(0.6)
    return 1.0


def panicking(response: str) -> float:
    match response:
        case "panic":
            raise Panic("called unwrap on None")
        case "silent":
            raise WithoutWords({"code": 1})
    return 1.0


async def panicking_async(response: str) -> float:
    await asyncio.sleep(0.1)
    return panicking(response)


async def limited(response: str) -> float:
    global at_once, most_at_once
    async with LIMIT:
        at_once += 1
        most_at_once = max(at_once, most_at_once)
        await asyncio.sleep(0.01)
        at_once -= 1
    return float(most_at_once)


class Judge:
    """An object with an async call."""

    async def __call__(self, response: str) -> float:
        await asyncio.sleep(0.2)
        return 2.0


judge = Judge()


async def asks_over_http(response: str, url: str) -> float:
    """By a client that the module keeps for all calls."""
    reply = await CLIENT.get(url, params={"answer": response})
    return float(reply.text)


def runs_python(response: str) -> float:
    """Its child reads its stdin to the end."""
    code = "import sys; sys.stdin.read(); print(float(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, response], stdout=subprocess.PIPE, timeout=20, check=True)
    return float(done.stdout)


def leaves_a_child(response: str, told: str) -> float:
    """Its child outlives the call; its number is in the file ``told``."""
    child = subprocess.Popen(["sleep", "1000"])
    with Path(told).open("a") as file:
        file.write(f"{child.pid}\n")
    return misbehaving(response, "", "")


def forks(response: str) -> float:
    """Its child ends, or comes back as it does; worth the child's exit code."""
    child = os.fork()
    if not child and response.isdigit():
        sys.exit(int(response))
    return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) if child else 1.0


async def forks_async(response: str) -> float:
    """The same, in an event loop."""
    await asyncio.sleep(0)
    return forks(response)


def closes(response: str) -> float:
    """All its descriptors, and then it does not end."""
    if response == "close":
        os.closerange(3, 256)
        time.sleep(1000)
    return 1.0


def slowly(response: str) -> float:
    """So that what comes after waits in its pipe."""
    time.sleep(0.6)
    return 1.0


def asks(
    messages: list[dict[str, str]], finish_reason: str, group: int, sample: int, step: int, reward_first: float = -1
) -> float:
    """Everything there is to ask for, as one number."""
    assert messages[0]["role"] == "user" and finish_reason in ("stop", "length")
    return group * 100 + sample * 10 + step + reward_first


def wants_more(response: str, embedding: Any) -> float:
    return 0.0


def rarest(response: list[str], truth: str, sample: list[int], group: int) -> list[float | None]:
    """Worth more where fewer say the same; none for an empty one."""
    assert isinstance(truth, str) and sample == list(range(len(response))) and group == 1
    return [1 / response.count(each) if each else None for each in response]


async def too_few(response: list[str]) -> list[float]:
    """One less than there are."""
    return [1.0] * (len(response) - 1)


def one_number(response: list[str]) -> float:
    """As one of single answers would."""
    return 1.0


def one_wrong(response: list[str]) -> list[Any]:
    """A word among the numbers."""
    return [1.0, "good", *[1.0] * (len(response) - 2)]


def one_large(response: list[str]) -> list[Any]:
    """Numbers, one of them larger than a float."""
    return [1.0, 10**400, *[1.0] * (len(response) - 2)]


def last_turn(turns: list[str], truth: str) -> float:
    """Of the last turn alone."""
    return float(turns[-1] == truth)


def as_many(response: list[str]) -> list[float]:
    """How many there are, for each."""
    return [float(len(response))] * len(response)


def as_many_as_seen(pictures: list[list[bytes]]) -> list[float]:
    """How many pictures each answer was shown."""
    return [float(len(each)) for each in pictures]


def constant(response: str) -> float:
    """Whatever was said."""
    return 1.0


def by_number(response: list[str]) -> dict[int, float]:
    return dict.fromkeys(range(len(response)), 0.5)


def several(response: str) -> Any:
    match response:
        case "lacks":
            return {"score": 1.0, "clear": 1.0}
        case "number":
            return 1.0
        case "words":
            return {"score": 1.0, "clear": "very", "cited": False}
    return {"score": len(response), "clear": 0.5, "cited": True, "why": "it is read by nobody"}


def as_verl_returns(response: str) -> dict[str, Any]:
    return {"score": len(response), "acc": True, "pred": response}


def rubric_of_group(response: list[str]) -> list[Any]:
    return [{"score": len(each), "clear": index, "cited": 0} for index, each in enumerate(response)]


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """As verl calls it."""
    assert data_source == "math"
    return float(solution_str == ground_truth) + extra_info.get("level", 0)


def counts_turns(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """As verl's examples read what its naive reward manager puts into ``extra_info``."""
    assert extra_info["rollout_reward_scores"] == {}
    return extra_info["num_turns"] + 10.0 * extra_info.get("level", 0)


def counts_no_turns(solution_str: list[str], extra_info: dict[str, Any]) -> list[float]:
    """Of all answers at once, whose turns no one number counts."""
    return [10.0 * extra_info["level"] + ("num_turns" in extra_info)] * len(solution_str)


def of_trl(prompts: Any, completions: Any, answer: list[str], **columns: Any) -> list[float | None]:
    """As TRL calls it, of prompts with messages."""
    assert prompts == [[{"role": "user", "content": "say"}]] * len(answer)
    assert columns["level"] == [1] * len(answer) and "prompt" not in columns
    said = [told[0]["content"] for told in completions]
    return [float(text == right) if text else None for text, right in zip(said, answer, strict=True)]


async def of_trl_plain(
    completions: list[str], prompts: list[str], ground_truth: list[str], bonus: float
) -> list[float]:
    return [float(text == truth) + bonus for text, truth in zip(completions, ground_truth, strict=True)]


def are_a(response: list[str]) -> list[float]:
    """Of a whole group."""
    return [float(each == "a") for each in response]
