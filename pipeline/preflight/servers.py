"""Servers that scorers ask: whether somebody listens where they are."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

CONNECT_S = 2.0
PORTS = {"http": 80, "https": 443}


def nobody_at(url: str, key: str) -> str:
    """Why nobody can be asked at ``url``, which the config's ``key`` gives; empty: somebody can, or it is only known to
    a proxy."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
        if parts.scheme in getproxies() and not proxy_bypass(host):
            return ""
        socket.create_connection((host, port), CONNECT_S).close()
    except (OSError, ValueError, KeyError) as error:
        return f"{key}: nobody listens at {url} ({error}); start it, or let the run do so (programs, with ready)"
    return ""
