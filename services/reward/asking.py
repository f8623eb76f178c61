"""Servers over HTTP that reward functions ask."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

from penstock.services.data import need

KEPT_CONNECTIONS = 20
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
"""Of the waits that a server has not asked for."""


class AskingError(RuntimeError):
    """A server gave no answer, or none that is of use; says what it said instead."""


@cache
def _client() -> Any:
    need("httpx", "http", "reward.functions")
    import httpx

    # A call's deadline is `timeout_s`; how many are under way, `reward.concurrency`. httpx searches all that it keeps.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS)
    return httpx.AsyncClient(timeout=None, limits=limits)


async def ask(url: str, body: dict[str, Any], attempts: int, headers: Mapping[str, str]) -> Any:
    """The answer (`httpx.Response`) to ``body`` as JSON. A busy or failing server (429, 5xx, a broken connection) is
    asked again, up to ``attempts`` times in all, each after twice as long, or after what it asks for. Raises
    `AskingError`."""
    import httpx

    wait_s = FIRST_WAIT_S
    for attempt in range(1, attempts + 1):
        asked_s = 0.0
        try:
            answer = await _client().post(url, json=body, headers=dict(headers))
            if answer.status_code == 200:
                return answer
            said = f"{answer.status_code}: {answer.text[:120]!r}"
            asked_s = _seconds(answer.headers.get("Retry-After", ""))
            if answer.status_code != 429 and answer.status_code < 500:
                raise AskingError(f"{url} answered {said}")
        except httpx.TransportError as error:
            said = f"{type(error).__name__}: {error}"
        if attempt == attempts:
            raise AskingError(f"{url} failed {attempts} times, the last time with {said}")
        await asyncio.sleep(max(asked_s, min(LONGEST_WAIT_S, wait_s * random.uniform(0.75, 1.25))))
        wait_s *= 2
    raise AssertionError


def _seconds(retry_after: str) -> float:
    """That it asks to wait, as seconds or as a date; 0 where it says neither."""
    if re.fullmatch(r"\d+(?:\.\d*)?", retry_after):
        return float(retry_after)
    try:
        return parsedate_to_datetime(retry_after).timestamp() - time.time()
    except ValueError:
        return 0.0
