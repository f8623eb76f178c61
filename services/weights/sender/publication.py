"""A version on its way to the rollouts, as the trainer waits for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from penstock.protocols import messages as m
from penstock.services.weights.queues import Event
from penstock.services.weights.sender.snapshot import Snapshot

Commit = Callable[[Snapshot, m.CommitVersion | None], Future[m.Message]]
"""Makes it durable that a version exists, and says what goes to the rollouts with it; answered by
`messages.Relayed`."""


@dataclass
class Publication:
    """A version on its way; or, with ``quiet``, one that is only made ready and committed, while steps are redone."""

    version: int
    canary: m.Canary | None = None
    commit: Commit | None = None
    """None for a version that no step yields: the one that the trainer starts with."""
    quiet: bool = False
    trained: Event | None = None
    """Where in the device's queue the version is there; set by `Publisher.publish`."""
    read: Future[None] = field(default_factory=Future)
    """Done once every parameter was read: the model may change."""
    committed: Future[None] = field(default_factory=Future)
    """Done once it is durable that the version exists."""

    def fail(self, error: BaseException) -> None:
        """Nobody who waits for it waits in vain."""
        for future in (self.read, self.committed):
            if not future.done():
                future.set_exception(error)
