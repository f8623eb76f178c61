"""One agent that is broken or hangs costs its own sessions, and nobody else's; nor may a page of the web ask."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.services.gateway.access import Access, NamedKey
from penstock.services.gateway.conversation import Conversation
from penstock.services.gateway.errors import AgentError
from penstock.services.gateway.fruitless import PEER, Fruitless
from penstock.services.runtime import files
from tests.gateway.house import House
from tests.gateway.test_doors import SAY, opened, served


def test_who_gives_up_before_a_turn_waits_longer_each_time_and_others_do_not(
    tokenizers: dict[bool, Path], model: Any
) -> None:
    house = House(tokenizers[False], model, tool_calls="none", attempts=100)
    house.desk.start(house.lease(0, n=8))

    async def agent() -> None:
        async def takes(peer: str, wait_s: float) -> float:
            PEER.set(peer)
            began = time.monotonic()
            held = await house.desk.open(wait_s)
            took = time.monotonic() - began
            if peer == "broken":
                await house.desk.abandon(held, "no module named 'my_tools'")
            return took

        waits = [await takes("broken", 5.0) for _ in range(3)]
        assert waits[0] < waits[1] < waits[2] and waits[1] > 0.4 and waits[2] > 0.9
        with pytest.raises(AgentError, match="given up before a turn") as told:
            await takes("broken", 0.1)
        assert told.value.code == "no_session" and 1 < (told.value.retry_s or 0) <= 2
        assert house.desk._openers == 0, "who waits so is nobody for whom groups are kept"
        assert await takes("sound", 5.0) < waits[2]
        PEER.set("broken")
        held = await house.desk.open(5.0)
        await house.desk.chat(held, Conversation(SAY))
        await house.desk.abandon(held, "given up behind a turn")
        assert await takes("broken", 5.0) < waits[2], "who had a turn can do its work"

    house.run(agent)


def test_nobody_waits_longer_than_a_minute_and_no_wait_outlives_the_run() -> None:
    async def main() -> None:
        one = Fruitless()
        for _ in range(60):
            one.gave_up("it", had_turns=False)
        with pytest.raises(AgentError) as told:
            await one.wait("it", time.monotonic() + 0.01, lambda: False)
        assert 59 < (told.value.retry_s or 0) <= 60
        await one.wait("it", time.monotonic() + 60, lambda: True)

    asyncio.run(main())


@pytest.mark.parametrize("beats", [False, True])
def test_an_agent_that_asks_for_no_turn_is_given_up_however_alive_it_says_it_is(
    tokenizers: dict[bool, Path], model: Any, beats: bool
) -> None:
    house = House(tokenizers[False], model, tool_calls="none", session_s=0.4, lost_s=60.0, idle_s=60.0)
    house.desk.start(house.lease(0))

    async def agent() -> None:
        held = await house.desk.open(5.0, beats)
        began = time.monotonic()
        await asyncio.sleep(0.3)
        await house.desk.chat(held, Conversation(SAY))
        while house.desk.rows():
            house.desk.heard([held.id])
            if not beats:
                await house.desk.find(held.id)
            left = house.desk.rows()[0]["given_on_s"]
            assert left is not None and left <= 0.4
            house.desk.expire()
            await asyncio.sleep(0.02)
        assert 0.7 <= time.monotonic() - began < 5, "counted from its last turn"

    house.run(agent)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8420", "[::1", "a b"])
def test_a_page_of_the_web_whose_name_was_made_the_loopbacks_is_refused(
    tokenizers: dict[bool, Path], model: Any, host: str
) -> None:
    house = House(tokenizers[False], model, tool_calls="none")
    house.desk.start(house.lease(0, n=2))

    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            session = await opened(url, http)
            end = f"{url}/v1/sessions/{session['session']}/finish"
            told = await http.post(end, json={"reward": 1e3}, headers={"Host": host, "Origin": f"http://{host}"})
            assert told.status_code in (400, 421) and len(house.desk.rows()) == 1
            port = url.rpartition(":")[2]
            for own in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "LOCALHOST"):
                assert (await http.get(f"{url}/v1/sessions", headers={"Host": own})).status_code == 200

    served(house, agent)


def test_keys_that_cannot_be_listed_stay_those_that_were_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or pyzmq's thread would end of it, and nobody came in by ZeroMQ any more."""
    access = Access(tmp_path, required=False)
    folder = tmp_path / "keys" / "agents"
    folder.mkdir(parents=True)
    files.write_whole(folder / "ann.json", NamedKey(sha256="0" * 64, curve_public="x" * 40).model_dump_json())
    assert access.admits("x" * 40)

    def stale(self: Path, pattern: str) -> Any:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "glob", stale)
    access._looked_at = float("-inf")
    assert access.admits("x" * 40) and not access.admits("y" * 40)
