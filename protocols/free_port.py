"""Which ports a server takes that may take any: those that stay free while it is started again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

OURS = range(20_000, 30_000)
"""Below those that Kubernetes gives to services."""
TRIES = 20
_LENT = Path("/proc/sys/net/ipv4/ip_local_port_range")


def lasting_ports() -> Sequence[int]:
    """Ports to try, in this order: none that the system lends to whoever connects to somewhere. One of those may be
    lent while its server is gone for a moment, to a client of that very server, too, which then connects to itself and
    keeps it. Empty where the system lends all of them."""
    try:
        first, last = map(int, _LENT.read_text().split())
    except (OSError, ValueError):
        first, last = 49_152, 65_535  # IANA's, which others than Linux have
    lasting = [port for port in OURS if not first <= port <= last]
    return random.SystemRandom().sample(lasting, min(TRIES, len(lasting)))
