"""This host's own address on the weight network."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, ip_network

import psutil

from penstock.services.runtime.errors import SetupError


def interface_of(address: str) -> str:
    """The name of the network interface that has ``address``. Raises `SetupError` where none has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    raise SetupError(f"weights.host: {address} is not an address of this host")


def own_address(host: str) -> str:
    """``host`` itself, or, where it is a network such as ``10.1.0.0/16``, this host's IPv4 address on that. Raises
    `SetupError` where there is none, or more than one."""
    if "/" not in host:
        return host
    try:
        network = ip_network(host)
    except ValueError as error:
        raise SetupError(f"weights.host: {error}") from None
    own = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET
    ]
    found = [address for address in own if IPv4Address(address) in network]
    if len(found) != 1:
        what = f"{len(found)} addresses" if found else "no address"
        raise SetupError(f"weights.host: this host has {what} on {network}; its addresses are {', '.join(own)}")
    return found[0]
