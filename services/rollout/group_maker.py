"""How a lease becomes a finished group: the interface of its makers."""

from __future__ import annotations

from typing import Protocol

from penstock.protocols.experience import Group
from penstock.protocols.messages import Lease
from penstock.services.rollout.engines.base import Completion, Refusal

Made = tuple[Lease, Group | str]
"""A lease with its group, or with the reason why there is none."""


class GroupMaker(Protocol):
    """Called from the rollout's one thread."""

    def start(self, lease: Lease) -> Made | None:
        """Begins a group. Returns it where nothing of it is sampled. Whatever it raises is the prompt's fault, and
        costs this group alone."""

    def has(self, lease: Lease) -> bool:
        """The group is being made."""

    def take(self, result: Completion | Refusal) -> Made | None:
        """The engine is done with a request. Returns what that completes."""

    def heard(self, event: object) -> Made | None:
        """Something that this maker has posted to the inbox has arrived. Returns what that completes."""

    def gauges(self) -> dict[str, float]:
        """Numbers for the dashboard."""

    def close(self) -> None:
        """Releases what it holds."""


def handle_of(lease: Lease) -> int:
    """What the engine calls a group: a training group's own number; one of an evaluation must not be mistaken for
    it."""
    return lease.number if lease.purpose == "train" else -1 - lease.number
