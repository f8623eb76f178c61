"""A broker that notes everything and looks at nothing: for measuring and testing the mailbox alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from protocols.mailbox import Exchange
from protocols.messages import Noted


@contextmanager
def noting(exchange: Exchange) -> Iterator[Exchange]:
    """Answers whatever comes to ``exchange`` with `Noted`, in a thread; closes it in the end."""
    serving = threading.Event()
    serving.set()

    def serve() -> None:
        while serving.is_set():
            for identity, request, _ in exchange.receive(0.02):
                exchange.send(identity, Noted(), request)
            exchange.flush()

    thread = threading.Thread(target=serve, name="noting", daemon=True)
    thread.start()
    try:
        yield exchange
    finally:
        serving.clear()
        thread.join()
        exchange.close()
