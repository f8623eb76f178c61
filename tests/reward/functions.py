"""Reward functions that misbehave."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any


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


async def slow(response: str, truth: Any, prompt: str) -> float:
    await asyncio.sleep(1000 if response == "hang" else 0.3)
    return 1.0
