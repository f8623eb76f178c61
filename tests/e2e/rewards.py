"""Reward functions for whole runs."""

from __future__ import annotations

import itertools
import os
import time
import zlib
from typing import Any

_calls = itertools.count()


def moody(response: str, truth: Any, messages: list[dict[str, str]], sample: int, group: int) -> Any:
    """Does everything wrong that a function can, each in the second answer of some groups."""
    print("a word on stdout")  # noqa: T201
    messages.clear()  # its own copy
    match group % 10 if sample == 1 else None:
        case 1:
            raise ValueError("not in the mood")
        case 2:
            return float("nan")
        case 3:
            return [1.0]
        case 4 if group < 12:
            time.sleep(1000)
        case 5:
            os._exit(1)
        case 6:
            return float(len(bytearray(2 << 30)) > 0)
    return float(response == truth)


def breaks(response: str, truth: Any, prompt: str) -> float:
    """Fails from its fifth call on in each process: a look before a run calls it twice for each of two sources."""
    if next(_calls) < 4:
        return 0.0
    raise KeyError("no such column")


def parity(response: str, truth: Any, prompt: str) -> float:
    """The same for every response to about half of the prompts."""
    key = prompt if zlib.crc32(prompt.encode()) % 2 else prompt + response
    return float(zlib.crc32(key.encode()) % 2)


def plenty(response_tokens: int) -> float:
    """The longer the better, but less and less so."""
    return float((response_tokens / 12) ** 0.5)


def by_source(response: str, truth: Any, source: str) -> float:
    """What a prompt is worth depends on where it is from."""
    return {"short": 1.0, "long": 0.25}[source] * float(len(response) > 0 or response == truth)
