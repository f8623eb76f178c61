"""Without the run's key, a socket beyond the loopback gives nothing."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import zmq

from penstock.pipeline.harness.ack_server import ack_server
from penstock.protocols import keys
from penstock.protocols.keys import ClientKeys, KeysError
from penstock.protocols.mailbox import AddressError, DeadlineError, Mailbox
from penstock.protocols.messages import Ack, Take
from penstock.protocols.router_server import RouterServer


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RouterServer]:
    keys.make(tmp_path / "keys")
    with ack_server(RouterServer("tcp://0.0.0.0:0", keys.load_broker(tmp_path / "keys" / "broker.json"))) as exchange:
        yield exchange


def address(exchange: RouterServer) -> str:
    return exchange.address.replace("0.0.0.0", "127.0.0.1")


def test_the_runs_key_opens_the_door_and_no_other_does(broker: RouterServer, tmp_path: Path) -> None:
    mine = keys.load_client(tmp_path / "keys" / "client.json")
    box = Mailbox(address(broker), "friend#1", mine)
    assert box.ask(Take(step=1), 5) == Ack()
    public, secret = (key.decode() for key in zmq.curve_keypair())
    wrong = ClientKeys(mine.broker_public, public, secret)
    for stranger in (None, wrong):
        outside = Mailbox(address(broker), "stranger#1", stranger)
        with pytest.raises(DeadlineError):
            outside.ask(Take(step=1), 1.0)
        outside.close(0)
    assert box.ask(Take(step=2), 5) == Ack()
    assert broker.strangers >= 2
    box.close()


def test_a_socket_that_others_can_reach_needs_keys() -> None:
    with pytest.raises(AddressError, match="can be reached from other machines"):
        RouterServer("tcp://0.0.0.0:0")


def test_keys_are_their_owners_alone_and_made_once(tmp_path: Path) -> None:
    keys.make(tmp_path)
    first = keys.load_client(tmp_path / "client.json")
    keys.make(tmp_path)
    assert keys.load_client(tmp_path / "client.json") == first
    for name in ("broker.json", "client.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    damaged = json.dumps(dict.fromkeys(asdict(first), 7))
    for bad in ("{}", damaged, damaged.replace("7", json.dumps(["x"] * 40))):
        (tmp_path / "bad.json").write_text(bad)
        with pytest.raises(KeysError, match="does not hold"):
            keys.load_client(tmp_path / "bad.json")
    with pytest.raises(KeysError, match="cannot read"):
        keys.load_client(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("where", "loopback"),
    [("tcp://127.0.0.1:5", True), ("tcp://localhost:5", True), ("tcp://0.0.0.0:5", False), ("tcp://10.0.0.1:5", False),
     ("tcp://*:5", False), ("ipc:///tmp/x", True), ("tcp://[::1]:5", True)],
)  # fmt: skip
def test_what_is_loopback(where: str, loopback: bool) -> None:
    assert keys.is_loopback(where) == loopback
