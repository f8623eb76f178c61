"""Many agents that open sessions and are never heard of again: told clearly, and forgotten whole."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.gateway.house import House
from tests.gateway.test_doors import served

OPENED = 10_000
AT_ONCE = 32
BODY = b'{"wait_s": 1}'
REQUEST = (
    b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_ten_thousand_sessions_that_are_opened_and_dropped(tokenizers: dict[bool, Path], model: Any) -> None:
    house = House(tokenizers[False], model, idle_s=0.1, attempts=1_000_000, sessions=64)
    for number in range(8):
        house.desk.start(house.lease(number, n=8))
    process, found, names = psutil.Process(), Counter[int](), set[str]()
    grown: list[int] = []

    async def open_and_drop(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)  # a client library would take longer than we
        while found[200] < OPENED:
            writer.write(REQUEST)
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            status, body = int(head.split()[1]), await reader.readexactly(size)
            found[status] += 1
            if status == 200:
                names.add(json.loads(body)["session"])
                assert len(house.desk._held) <= 64
            if found[200] in (OPENED // 2, OPENED):
                grown.append(process.memory_info().rss)

    async def expire() -> None:
        while found[200] < OPENED:
            house.desk.expire()
            await asyncio.sleep(0.02)

    async def agent(url: str) -> None:
        await asyncio.gather(expire(), *(open_and_drop(int(url.rpartition(":")[2])) for _ in range(AT_ONCE)))

    served(house, agent, seconds=240)
    assert set(found) <= {200, 503} and len(names) >= OPENED, "each under a name of its own"
    assert len(house.desk._held) <= 64 and sum(len(kept) for kept in house.records.values()) <= 64
    assert grown[-1] - grown[0] < 40 << 20, "what was dropped is forgotten"
