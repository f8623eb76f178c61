"""Servers that reward functions ask: whether somebody listens where they are."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from penstock.services.reward.config import ASKING, FunctionConfig

CONNECT_S = 2.0
PORTS = {"http": 80, "https": 443}


def nobody_at(function: FunctionConfig, key: str) -> str:
    """Why the function at ``key`` of a config has no server to ask; empty: it has, or asks none, or only by a proxy, or
    is not to be tried."""
    url = str(function.options.get("url", ""))
    if function.function not in ASKING or not function.trial or not url:
        return ""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
        if parts.scheme in getproxies() and not proxy_bypass(host):
            return ""
        socket.create_connection((host, port), CONNECT_S).close()
    except (OSError, ValueError, KeyError) as error:
        return (
            f"{key}.options.url: nobody listens at {url} ({error}); start it, or let the run do so (programs, with "
            f"ready), or set {key}.trial=false"
        )
    return ""
