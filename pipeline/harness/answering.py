"""A broker's port and thread, for brokers that are none: what is said to them a method answers."""

from __future__ import annotations

import threading
from typing import Self

from penstock.protocols.messages import Message
from penstock.protocols.router_server import RouterServer


class AnsweringBroker:
    """Hears from when it is made until `close`; whoever is derived from it has its own attributes by then."""

    def __init__(self) -> None:
        self.router = RouterServer("tcp://127.0.0.1:0")
        self._open = True
        self._thread = threading.Thread(target=self._run, name="answering-broker", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where actors reach it."""
        return self.router.address

    def close(self) -> None:
        """Ends the thread."""
        self._open = False
        self._thread.join(5)
        self.router.close()

    def answer(self, identity: str, message: Message) -> Message | None:
        """To what ``identity`` says; None: silence."""
        raise NotImplementedError

    def turn(self) -> None:
        """Called once what has come in is answered."""

    def _run(self) -> None:
        while self._open:
            for identity, request, message in self.router.receive(0.02):
                answer = self.answer(identity, message)
                if answer is not None:
                    self.router.send(identity, answer, request)
            self.turn()
            self.router.flush()
