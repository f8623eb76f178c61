"""Finding this host's own address on a network."""

from __future__ import annotations

import pytest

from penstock.services.runtime import address
from penstock.services.runtime.address import own_address, own_endpoint, own_network, reached_at, reached_endpoint
from penstock.services.runtime.errors import SetupError


def test_an_address_is_itself_and_a_network_is_looked_up() -> None:
    assert own_address("10.1.2.3") == "10.1.2.3"
    assert own_address("127.0.0.0/8") == "127.0.0.1"
    assert own_address("localhost") == "127.0.0.1"


@pytest.mark.parametrize(
    "host, message",
    [
        ("203.0.113.0/24", "no address on 203.0.113.0/24"),
        ("127.0.0.1/8", "host bits set"),
        ("::1", "::1 is an IPv6 address"),
        ("[fd00::1]", "is an IPv6 address"),
        ("no-such-host.invalid", "nobody knows the name"),
    ],
)
def test_what_cannot_be_is_named(host: str, message: str) -> None:
    with pytest.raises(SetupError, match=f"weights.host: .*{message}"):
        own_address(host)


def test_of_several_addresses_on_a_network_it_is_the_one_that_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [(f"10.2.0.{last}", "255.255.0.0") for last in (7, 8, 9)]
    monkeypatch.setattr(address, "_addresses", lambda: own)
    for towards, chosen in (("10.2.0.8", "10.2.0.8"), (None, "10.2.0.7"), ("192.0.2.1", "10.2.0.7")):
        monkeypatch.setattr(address, "_address_towards", lambda other, found=towards: found)
        assert own_address("10.2.0.0/16") == chosen


def test_a_port_may_be_on_a_network() -> None:
    assert own_endpoint("tcp://127.0.0.0/8:5555", "broker.bind") == "tcp://127.0.0.1:5555"
    assert own_endpoint("tcp://0.0.0.0:0", "broker.bind") == "tcp://0.0.0.0:0"
    with pytest.raises(SetupError, match=r"broker.bind: this host has no address on 203.0.113.0/24"):
        own_endpoint("tcp://203.0.113.0/24:0", "broker.bind")


def test_the_network_towards_an_address_holds_this_hosts_own() -> None:
    assert own_network(towards="127.0.0.1") == "127.0.0.0/8"


def test_who_listens_everywhere_is_reached_at_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reached_at("10.1.2.3") == "10.1.2.3" and reached_at("0.0.0.0") != "0.0.0.0"
    monkeypatch.setattr(address.socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(address, "_address_towards", lambda: "10.1.2.3")
    assert reached_at("") == "10.1.2.3", "the name of this machine is its loopback's"
    monkeypatch.setattr(address.socket, "gethostbyname", lambda name: "203.0.113.9")
    assert reached_at("") == "10.1.2.3", "this machine is called so by others alone"
    for bound in ("tcp://0.0.0.0:5555", "tcp://[::]:5555"):
        assert reached_endpoint(bound) == "tcp://10.1.2.3:5555"
    for bound in ("tcp://10.1.2.4:5555", "tcp://[fd00::1]:5555"):
        assert reached_endpoint(bound) == bound
