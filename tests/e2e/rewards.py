"""Reward functions for whole runs."""

from __future__ import annotations

import os
import time
import zlib
from typing import Any


def moody(response: str, truth: Any, prompt: str) -> float:
    """Raises, hangs, crashes or returns NaN for a few responses, always the same ones."""
    match zlib.crc32((prompt + response).encode()) % 60:
        case 0:
            raise ValueError("not in the mood")
        case 1:
            return float("nan")
        case 2 if zlib.crc32(response.encode()) % 5 == 0:
            time.sleep(1000)
        case 3 if zlib.crc32(response.encode()) % 5 == 0:
            os._exit(1)
    return float(response == truth)


def broken(response: str, truth: Any, prompt: str) -> float:
    """Always fails."""
    raise KeyError("no such column")


def parity(response: str, truth: Any, prompt: str) -> float:
    """The same for every response to about half of the prompts."""
    key = prompt if zlib.crc32(prompt.encode()) % 2 else prompt + response
    return float(zlib.crc32(key.encode()) % 2)
