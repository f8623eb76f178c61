"""Many agents that open sessions and are never heard of again: told clearly, and forgotten whole."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.gateway.house import House
from tests.gateway.test_doors import served

OPENED = 10_000
AT_ONCE = 32


@pytest.mark.timeout(300)
def test_ten_thousand_sessions_that_are_opened_and_dropped(tokenizers: dict[bool, Path], model: Any) -> None:
    house = House(tokenizers[False], model, idle_s=0.2, attempts=1_000_000, sessions=64)
    for number in range(8):
        house.desk.start(house.lease(number, n=8))
    process, found, names = psutil.Process(), Counter[int](), set[str]()
    grown: list[int] = []

    async def open_and_drop(http: httpx.AsyncClient) -> None:
        while found[200] < OPENED:
            answer = await http.post("/v1/sessions", json={"wait_s": 1})
            found[answer.status_code] += 1
            if answer.status_code == 200:
                names.add(answer.json()["session"])
                assert len(house.desk._held) <= 64
            if found[200] in (OPENED // 2, OPENED):
                grown.append(process.memory_info().rss)

    async def expire() -> None:
        while found[200] < OPENED:
            house.desk.expire()
            await asyncio.sleep(0.02)

    async def agent(url: str) -> None:
        limits = httpx.Limits(max_connections=AT_ONCE)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as http:
            await asyncio.gather(expire(), *(open_and_drop(http) for _ in range(AT_ONCE)))

    served(house, agent)
    assert set(found) <= {200, 503} and len(names) >= OPENED, "each under a name of its own"
    assert len(house.desk._held) <= 64 and sum(len(kept) for kept in house.records.values()) <= 64
    assert grown[-1] - grown[0] < 40 << 20, "what was dropped is forgotten"
