"""Servers over HTTP that scorers ask."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any
from weakref import WeakKeyDictionary

from penstock.services.runtime.errors import PackageError
from penstock.services.runtime.install import install

KEPT_CONNECTIONS = 20
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
"""Of the waits that a server has not asked for."""


class AskingError(RuntimeError):
    """A server gave no answer, or none that is of use; says what it said instead."""


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()
"""One for each loop, which its connections belong to."""


def _client() -> Any:
    """`httpx.AsyncClient`, of the loop that runs."""
    loop = asyncio.get_running_loop()
    if loop in _clients:
        return _clients[loop]
    try:
        import httpx
    except ImportError:
        raise PackageError(f"httpx is not installed, by which servers are asked; run: {install('http')}") from None

    # A call's deadline is `timeout_s`; how many are under way, `reward.concurrency`. httpx searches all that it keeps.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS)
    return _clients.setdefault(loop, httpx.AsyncClient(timeout=None, limits=limits))


async def ask(url: str, body: dict[str, Any], attempts: int, headers: Mapping[str, str]) -> Any:
    """The answer (`httpx.Response`) to ``body`` as JSON. A busy or failing server (429, 5xx, a broken connection) is
    asked again, up to ``attempts`` times in all, each after twice as long, or after what it asks for. Raises
    `AskingError`."""
    client = _client()
    import httpx

    wait_s = FIRST_WAIT_S
    for attempt in range(1, attempts + 1):
        asked_s = 0.0
        try:
            answer = await client.post(url, json=body, headers=dict(headers))
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
