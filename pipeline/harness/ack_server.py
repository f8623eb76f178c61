"""A broker that notes everything and looks at nothing: for measuring and testing the mailbox alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.protocols.messages import Ack
from penstock.protocols.router_server import RouterServer


@contextmanager
def ack_server(router: RouterServer) -> Iterator[RouterServer]:
    """Answers whatever comes to ``router`` with `Ack`, in a thread; closes it in the end."""
    serving = threading.Event()
    serving.set()

    def serve() -> None:
        while serving.is_set():
            for identity, request, _ in router.receive(0.02):
                router.send(identity, Ack(), request)
            router.flush()

    thread = threading.Thread(target=serve, name="ack_server", daemon=True)
    thread.start()
    try:
        yield router
    finally:
        serving.clear()
        thread.join()
        router.close()
