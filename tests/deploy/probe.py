"""Run in a container of the control network, without keys: which ports are open, and does anybody answer?

Prints ``{host: {port: answered}}`` as JSON.
"""

from __future__ import annotations

import json
import socket
import sys

from penstock.protocols.mailbox import DeadlineError, Mailbox, incarnation_of
from penstock.protocols.messages import Hello


def is_open(host: str, port: int) -> bool:
    """Something listens there."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((host, port)) == 0


def answers(host: str, port: int) -> bool:
    """It speaks to somebody who has no keys: as a broker does, or by any byte but ZeroMQ's greeting."""
    mailbox = Mailbox(f"tcp://{host}:{port}", incarnation_of("stranger"))
    try:
        mailbox.ask(Hello(kind="observer", name="stranger", host="", pid=1), 3)
        return True
    except DeadlineError:
        pass
    finally:
        mailbox.close()
    with socket.create_connection((host, port), 3) as raw:
        raw.settimeout(3)
        raw.sendall(b"PING\r\n")
        try:
            return raw.recv(64)[:1] not in (b"", b"\xff")
        except OSError:
            return False


def main() -> None:
    """Hosts by argument."""
    found = {}
    for name in sys.argv[1:]:
        host = socket.gethostbyname(name)
        found[name] = {port: answers(host, port) for port in range(1, 65536) if is_open(host, port)}
    sys.stdout.write(json.dumps(found))


main()
