"""This host's own address, where a config that holds for many hosts names a network."""

from __future__ import annotations

import re
import socket
from ipaddress import IPv4Address, ip_network

import psutil

from penstock.services.runtime.errors import SetupError

ELSEWHERE = "192.0.2.1"
"""An address that is nobody's."""
_ON_NETWORK = re.compile(r"tcp://([^/:]+/\d+):(\d+)")


def interface_of(address: str) -> str:
    """The name of the network interface that has ``address``. Raises `SetupError` where none has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    raise SetupError(f"weights.host: {address} is not an address of this host")


def own_address(host: str, key: str = "weights.host") -> str:
    """The IPv4 address that ``host`` is or names; where it is a network such as ``10.1.0.0/16``, this host's address on
    that, of several the one by which it would reach the network. Raises `SetupError`, which names ``key``, where there
    is none."""
    if "/" not in host:
        return _ipv4(host, key)
    try:
        network = ip_network(host)
    except ValueError as error:
        raise SetupError(f"{key}: {error}") from None
    own = [address for address, _ in _addresses()]
    found = [address for address in own if IPv4Address(address) in network]
    if not found:
        raise SetupError(f"{key}: this host has no address on {network}; its addresses are {', '.join(own)}")
    if len(found) > 1 and (chosen := _address_towards(str(network.network_address + 1))) in found:
        return str(chosen)
    return found[0]


def _ipv4(host: str, key: str) -> str:
    """The address that ``host`` names. Raises `SetupError`: ports of the weight network are IPv4's."""
    try:
        return str(IPv4Address(host))
    except ValueError:
        pass
    if ":" in host:
        raise SetupError(f"{key}: {host} is an IPv6 address; take this host's IPv4 address, or a network of IPv4")
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise SetupError(f"{key}: {host} is no address, and nobody knows the name: {error}") from None


def own_endpoint(bind: str, key: str) -> str:
    """``bind`` itself, or, where it is a port on a network such as ``tcp://10.1.0.0/16:5555``, that port of this host's
    address on it. Raises `SetupError` as `own_address` does."""
    named = _ON_NETWORK.fullmatch(bind)
    return f"tcp://{own_address(named[1], key)}:{named[2]}" if named else bind


def own_network(towards: str = ELSEWHERE) -> str | None:
    """The network by which this host reaches others, e.g. ``10.1.0.0/16``: nothing is sent. None where it reaches
    nobody."""
    mine = _address_towards(towards)
    masks = [mask for address, mask in _addresses() if address == mine and mask]
    return str(ip_network(f"{mine}/{masks[0]}", strict=False)) if masks else None


def reached_at(host: str) -> str:
    """What others on this network reach ``host`` by, where this machine listens everywhere."""
    if host not in ("0.0.0.0", "::", "[::]", ""):
        return host
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = "127.0.0.1"
    # Many a machine's own name is its loopback, or one that only others know it by.
    own = not named.startswith("127.") and named in [address for address, _ in _addresses()]
    return named if own else _address_towards() or "127.0.0.1"


def reached_endpoint(bound: str) -> str:
    """The same for what was bound, such as ``tcp://0.0.0.0:5555``."""
    host, _, port = bound.removeprefix("tcp://").rpartition(":")
    return f"tcp://{reached_at(host)}:{port}"


def _address_towards(other: str = ELSEWHERE) -> str | None:
    """This host's, by which it reaches ``other``: nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _addresses() -> list[tuple[str, str]]:
    """Of this host, with their netmasks; IPv4."""
    entries = [entry for found in psutil.net_if_addrs().values() for entry in found]
    return [(entry.address, entry.netmask or "") for entry in entries if entry.family == socket.AF_INET]
