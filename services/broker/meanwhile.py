"""What others hear and say while the broker waits for its store, or reads its prompts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from penstock.protocols import messages as m
from penstock.protocols.router_server import TURN_BYTES, RouterServer
from penstock.services.runtime import health

EVERY_S = 0.2
T = TypeVar("T")
Said = tuple[str, int, m.Message]
"""Who, by which request, and what."""


AGAIN = (m.Finished, m.Scores, m.Generated, m.TurnRequest, m.Note, m.StepColumn)
"""What may be large, and is said again until it is answered."""


class Meanwhile:
    """Called now and then, it answers heartbeats, tells whoever asks for something that it waits, and keeps all else
    for the next turn; without more room, what is large and will be said again is left out. A store may be away, or have
    much to read, for longer than anybody waits for a silent broker."""

    def __init__(self, router: RouterServer) -> None:
        self._router = router
        self.knows: Callable[[str], bool] = lambda identity: True
        """Who is a member; before the store has said so, everybody may be."""
        self._said: list[Said] = []
        self._beats: dict[str, Said] = {}
        """The newest of each: who has beaten is not dead, and holds what it says."""
        self._from = 0
        """What had been received before it, in bytes."""

    def __call__(self) -> None:
        health.beat()
        if not self._said:
            self._from = self._router.received_bytes
        full = self._router.received_bytes - self._from >= TURN_BYTES
        for identity, request, message in self._router.receive(0.0):
            if request or isinstance(message, m.Heartbeat):
                self._router.send_now(identity, m.Waits())
            if isinstance(message, m.Heartbeat) and self.knows(identity):
                self._router.send_now(identity, m.HeartbeatAck())
                self._beats[identity] = identity, request, message
            elif not (full and isinstance(message, AGAIN)):
                self._said.append((identity, request, message))

    def until(self, work: Callable[[], T]) -> T:
        """What ``work`` returns, which is done beside."""
        with ThreadPoolExecutor(1) as beside:
            done = beside.submit(work)
            while not done.done():
                self()
                wait([done], EVERY_S)
            return done.result()

    def said(self) -> list[Said]:
        """What came, and is to be handled now. Who has said hello is known by that alone: told to say it once more, as
        it had beaten before, it would not name what the first hello gives it."""
        hello = {identity for identity, _, message in self._said if isinstance(message, m.Hello)}
        first = [beat for identity, beat in self._beats.items() if identity not in hello]
        found = [*first, *self._said, *(beat for identity, beat in self._beats.items() if identity in hello)]
        self._said, self._beats = [], {}
        return found
