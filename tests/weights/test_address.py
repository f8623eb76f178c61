"""Finding this host's own address on the weight network."""

from __future__ import annotations

import pytest

from penstock.services.runtime.errors import SetupError
from penstock.services.weights.address import own_address


def test_an_address_is_itself_and_a_network_is_looked_up() -> None:
    assert own_address("10.1.2.3") == "10.1.2.3"
    assert own_address("127.0.0.0/8") == "127.0.0.1"


@pytest.mark.parametrize(
    "host, message", [("203.0.113.0/24", "no address on 203.0.113.0/24"), ("127.0.0.1/8", "host bits set")]
)
def test_what_cannot_be_is_named(host: str, message: str) -> None:
    with pytest.raises(SetupError, match=f"weights.host: .*{message}"):
        own_address(host)
