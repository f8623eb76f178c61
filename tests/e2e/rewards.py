"""Reward functions for whole runs."""

from __future__ import annotations

import itertools
import os
import time
import zlib
from typing import Any

_calls = itertools.count()


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


def breaks(response: str, truth: Any, prompt: str) -> float:
    """Fails from its third call on in each process: the look before a run calls it twice."""
    if next(_calls) < 2:
        return 0.0
    raise KeyError("no such column")


def parity(response: str, truth: Any, prompt: str) -> float:
    """The same for every response to about half of the prompts."""
    key = prompt if zlib.crc32(prompt.encode()) % 2 else prompt + response
    return float(zlib.crc32(key.encode()) % 2)


def plenty(response_tokens: int) -> float:
    """The longer the better, but less and less so."""
    return float((response_tokens / 12) ** 0.5)
