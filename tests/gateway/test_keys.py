"""Keys for agents elsewhere: what each may take, whose sessions it sees, and that it can be taken away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from penstock.pipeline import cli
from penstock.pipeline.harness.ack_server import ack_server
from penstock.protocols import agent_client, agent_line
from penstock.protocols import keys as curve
from penstock.protocols import messages as m
from penstock.protocols.agent_client import AgentClient, AgentRefusedError, AsyncAgentClient
from penstock.protocols.experience import as_bytes
from penstock.protocols.keys import load_client
from penstock.protocols.mailbox import DeadlineError, Mailbox, incarnation_of
from penstock.protocols.messages import LedgerRequest
from penstock.protocols.router_server import RouterServer
from penstock.services.gateway import access, bodies, zmq_door
from penstock.services.gateway.access import Access
from penstock.services.gateway.zmq_door import ZmqDoor
from tests.gateway.house import House
from tests.gateway.test_doors import SAY, owners, served
from tests.gateway.test_takeovers import late


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(access, "LOOK_S", 0.0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("run: {name: agent}\ngateway: {count: 1}\n")
    curve.make(tmp_path / "run" / "keys")
    return tmp_path / "run"


@pytest.fixture
def house(tokenizers: dict[bool, Path], model: Any) -> House:
    made = House(tokenizers[True], model)
    made.desk.start(made.lease(0, n=4))
    made.desk._settled_at = 0.0
    return made


def keys(*arguments: str) -> str:
    told = CliRunner().invoke(cli.app, ["keys", *arguments])
    if told.exception and not isinstance(told.exception, SystemExit):
        raise told.exception
    return told.output


def http_key(output: str) -> dict[str, str]:
    return {"Authorization": "Bearer " + output.splitlines()[0].removeprefix("over HTTP: ")}


def test_over_http_a_key_sees_its_own_sessions_and_takes_no_more_than_it_may(run: Path, house: House) -> None:
    (run / "gateways").mkdir()
    (run / "gateways" / "gateway-0.json").write_text('{"zmq": "tcp://10.1.0.7:8421"}')
    added = keys("add", str(run), "alice", "--sessions", "1", "--turns-per-minute", "2")
    assert 'AgentClient("tcp://10.1.0.7:8421", keys="alice.keys.json")' in added
    alice, bob = http_key(added), http_key(keys("add", str(run), "bob", "--days", "3"))
    listed = keys("list", str(run))
    assert "alice" in listed and "bob" in listed and "note" not in added
    (run / "config.yaml").write_text("gateway: {count: 0}\n")
    assert "note: no gateway reads it" in keys("add", str(run), "carol")

    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60, base_url=url) as http:

            async def asked(key: dict[str, str], path: str, body: dict[str, Any]) -> httpx.Response:
                return await http.post(path, json=body, headers=key)

            first = await asyncio.gather(*(asked(alice, "/v1/sessions", {"wait_s": 0}) for _ in range(4)))
            (opened,) = [each.json() for each in first if each.status_code == 200]
            several = await asyncio.gather(*(asked(alice, "/v1/sessions", {"wait_s": 0}) for _ in range(4)))
            more = several[0]
            assert {each.status_code for each in several} == {429} and more.json()["error"]["code"] == "quota"
            assert int(more.headers["retry-after"]) > 0
            chat = f"/s/{opened['session']}/v1/chat/completions"
            turns = [await asked(alice, chat, {"messages": SAY}) for _ in range(2)]
            (held,) = house.desk._held.values()
            said_at, held.touched = held.touched, 0.0
            turns.append(await asked(alice, chat, {"messages": SAY}))
            assert held.touched > said_at, "what is refused is a word of its agent, too"
            assert [each.status_code for each in turns] == [200, 200, 429]
            assert 0 < int(turns[-1].headers["retry-after"]) <= 60, "whole seconds, as HTTP has them"
            assert (await asked(bob, chat, {"messages": SAY})).status_code == 404, "not his"
            assert (await asked(bob, f"/v1/sessions/{opened['session']}/finish", {"reward": 1.0})).status_code == 404
            own = {"x-api-key": "right"}
            assert (await asked(own, chat, {"messages": SAY})).status_code == 200, "the owner's are all"
            (row,) = (await http.get("/v1/sessions", headers=own)).json()
            assert row["key"] == "alice" and not (await http.get("/v1/sessions", headers=bob)).json()
            assert keys("revoke", str(run), "alice") == "alice is revoked\n"
            assert (await asked(alice, chat, {"messages": SAY})).status_code == 401
            assert (await asked({}, chat, {"messages": SAY})).status_code == 401

    served(house, agent, owners(run, "right"))


def test_what_a_key_may_not_ask_is_not_read_and_its_requests_are_held_up_to_a_limit(
    run: Path, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "HELD", 100_000)
    alice = http_key(keys("add", str(run), "alice", "--turns-per-minute", "1"))

    async def agent(url: str) -> None:
        async with httpx.AsyncClient(timeout=60, base_url=url, headers=alice) as http:

            async def slow(size: int) -> int:
                """A request of which a part stays away for a second."""

                async def parts() -> AsyncIterator[bytes]:
                    yield b"{"
                    await asyncio.sleep(1.0)
                    yield b" " * (size - 1)

                headers = {"content-length": str(size), "content-type": "application/json"}
                return (await http.post("/v1/sessions", content=parts(), headers=headers)).status_code

            assert sorted(await asyncio.gather(slow(60_000), slow(60_000), slow(20_000))) == [422, 422, 429]
            opened = (await http.post("/v1/sessions", json={})).json()
            chat = f"/s/{opened['session']}/v1/chat/completions"
            assert (await http.post(chat, json={"messages": SAY})).status_code == 200
            refused = await http.post(chat, content=b"no JSON", headers={"content-type": "application/json"})
            assert refused.status_code == 429 and float(refused.headers["retry-after"]) > 0

    served(house, agent, owners(run, "right"))


@asynccontextmanager
async def opened(run: Path, house: House) -> AsyncIterator[ZmqDoor]:
    """The gateway's ZeroMQ door, which asks for keys."""
    served_keys = load_client(run / "keys" / "client.json").to_serve()
    door = ZmqDoor("tcp://127.0.0.1:*", house.desk, served_keys, Access(run, required=True))
    door.start(asyncio.get_running_loop(), "http://here")
    try:
        yield door
    finally:
        await asyncio.to_thread(door.close)


def test_over_zeromq_a_key_opens_gateways_alone_until_it_is_taken_away(
    run: Path, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys("add", str(run), "alice", "--sessions", "1", "--out", "alice.json")
    assert Path("alice.json").stat().st_mode & 0o777 == 0o600

    async def agent() -> None:
        async with opened(run, house) as door, AsyncAgentClient(door.address, keys="alice.json") as client:
            session = await client.session()
            await session.chat(SAY)
            with pytest.raises(AgentRefusedError, match="holds 1 sessions at most"):
                await client.session(wait_s=0)
            own = load_client(run / "keys" / "client.json").to_reach()
            async with AsyncAgentClient(door.address, keys=own) as owner:
                other = await owner.session()
                assert house.desk.rows()[1]["session"] == other.id and house.desk.rows()[0]["key"] == "alice"
            keys("revoke", str(run), "alice")
            with pytest.raises(AgentRefusedError, match="taken away"):
                await session.chat(SAY)

    house.run(agent)


def test_over_zeromq_what_a_key_may_not_ask_is_not_read_either_nor_more_than_so_many_bytes(
    run: Path, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys("add", str(run), "alice", "--turns-per-minute", "2", "--out", "alice.json")
    monkeypatch.setattr(zmq_door, "HELD", 1000)
    read: list[Any] = []
    own = zmq_door._read
    monkeypatch.setattr(zmq_door, "_read", lambda kind, said: (read.append(kind), own(kind, said))[1])

    async def agent() -> None:
        async with opened(run, house) as door, AsyncAgentClient(door.address, keys="alice.json") as client:
            session = await client.session()
            slow = late(house)
            first = asyncio.ensure_future(session.chat(SAY))
            await asyncio.sleep(0.2)
            large = m.AgentChat(session=session.id, request="a", messages=[{**SAY[0], "name": "b" * 1000}])
            answer = await asyncio.wrap_future(client._line.ask(large, 5.0))
            assert isinstance(answer, m.AgentRefused) and "1000 bytes at most" in answer.reason and len(read) == 1
            slow.set()
            await first
            await session.generate(house.text.encode(session.task))
            for asked in (
                m.AgentChat(session=session.id, request="b", messages=[]),
                m.AgentGenerate(session=session.id, request="c", tokens=as_bytes(b"")),
            ):
                answer = await asyncio.wrap_future(client._line.ask(asked, 5.0))
                assert isinstance(answer, m.AgentRefused) and (answer.status, answer.code) == (429, "quota")
            assert len(read) == 2

    house.run(agent)


def test_to_have_tokens_counted_is_a_turn(run: Path, house: House) -> None:
    alice = http_key(keys("add", str(run), "alice", "--turns-per-minute", "2"))

    async def agent(url: str) -> list[int]:
        async with httpx.AsyncClient(timeout=60, base_url=url, headers=alice) as http:
            session = (await http.post("/v1/sessions", json={})).json()["session"]
            path = f"/s/{session}/v1/messages/count_tokens"
            return [(await http.post(path, json={"messages": SAY})).status_code for _ in range(3)]

    assert served(house, agent, owners(run, "right")) == [200, 200, 429]


def test_a_named_key_does_not_open_the_broker(run: Path) -> None:
    keys("add", str(run), "alice", "--out", "alice.json")
    broker = RouterServer("tcp://127.0.0.1:*", curve.load_broker(run / "keys" / "broker.json"))
    guest = load_client(Path("alice.json"))
    known = load_client(run / "keys" / "client.json")
    for tried in (guest, curve.ClientKeys(known.broker_public, guest.client_public, guest.client_secret)):
        mailbox = Mailbox(broker.address, incarnation_of("guest"), tried)
        asked = mailbox.ask_later(LedgerRequest(), 1.0)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            assert not broker.receive(0.05)
        with pytest.raises(DeadlineError):
            asked.result(5)
        mailbox.close()
    broker.close()


@pytest.mark.parametrize("with_key", [False, True])
def test_an_agent_that_a_gateway_does_not_let_in_is_told_in_time(
    run: Path, monkeypatch: pytest.MonkeyPatch, with_key: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a key where one is needed, and with one where nobody has keys."""
    monkeypatch.setattr(agent_client, "GRACE_S", 1.0)
    monkeypatch.setattr(agent_line, "QUIET_S", 0.3)
    own = load_client(run / "keys" / "client.json")
    with (
        ack_server(RouterServer("tcp://127.0.0.1:*", None if with_key else own.to_serve())) as gateway,
        AgentClient(gateway.address, own.to_reach() if with_key else None) as client,
        pytest.raises(DeadlineError, match=r"so far: is it another machine's loopback, or are keys missing"),
    ):
        client.session(wait_s=0.5)
    told = capsys.readouterr().err
    assert told.startswith(f"waiting for the gateway at {gateway.address}: it has answered nothing so far: is it"), told


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["add", "RUN", "no/name"], "NAME: 'no/name'"),
        (["add", "nowhere", "alice"], "RUN: nowhere is no run's folder"),
        (["add", "RUN", "alice", "--sessions", "0"], "--sessions"),
        (["add", "RUN", "alice", "--out", "there/alice.json"], "--out: cannot write"),
        (["revoke", "RUN", "bob"], "no key 'bob'"),
    ],
)
def test_what_is_wrong_with_a_key_is_told(run: Path, arguments: list[str], match: str) -> None:
    told = CliRunner().invoke(cli.app, ["keys", *(str(run) if a == "RUN" else a for a in arguments)])
    assert match in told.output + str(told.exception) and not list((run / "keys" / "agents").glob("*"))


def test_a_file_that_is_no_key_costs_itself_alone(run: Path) -> None:
    shown = http_key(keys("add", str(run), "alice"))["Authorization"].removeprefix("Bearer ")
    (run / "keys" / "agents" / "broken.json").write_text("{")
    assert Access(run, required=True).by_bearer(shown).name == "alice"
