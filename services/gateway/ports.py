"""Where a gateway listens: the config's ports are the first one's, and each further one has the next two."""

from __future__ import annotations

import contextlib
import socket
from urllib.parse import urlsplit

from penstock.protocols.free_port import lasting_ports
from penstock.protocols.mailbox import AddressError
from penstock.services.gateway.config import GatewayConfig
from penstock.services.runtime.address import own_endpoint

EACH = 2


def http_at(config: GatewayConfig, index: int) -> tuple[str, int]:
    """Host, without an IPv6 address's brackets, and port of the gateway with this number; port 0: any free one."""
    host, _, port = config.http.rpartition(":")
    return host.strip("[]"), _shifted(int(port), index)


def bind_at(config: GatewayConfig, index: int) -> tuple[str, int]:
    """As `http_at`, for `penstock.AgentClient`."""
    at = urlsplit(own_endpoint(config.bind, "gateway.bind"))
    return at.hostname or "", _shifted(at.port or 0, index)


def listen(key: str, host: str, port: int) -> socket.socket:
    """A listening socket. ``key`` is the config's, for errors. Raises `AddressError`."""
    v6 = ":" in host
    family = socket.AF_INET6 if v6 else socket.AF_INET

    def listening(port: int) -> socket.socket:
        return socket.create_server((host, port), family=family, dualstack_ipv6=v6 and socket.has_dualstack_ipv6())

    for lasting in lasting_ports() if not port else ():
        with contextlib.suppress(OSError):
            return listening(lasting)
    try:
        return listening(port)
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) else "there is no such port"
        raise AddressError(
            f"{key}: cannot listen on {address(host, port)}: {why}; choose another port, or 0 for a free one"
        ) from None


def address(host: str, port: int | str) -> str:
    """Both, as they stand in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _shifted(port: int, index: int) -> int:
    return port + EACH * index if port else 0
