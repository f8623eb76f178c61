"""Who is here: members by name, one incarnation each, with their credit and the version they serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from protocols.messages import ActorKind, Hello


@dataclass(slots=True)
class Member:
    """One live actor."""

    identity: str
    """``name#incarnation``"""
    name: str
    kind: ActorKind
    host: str
    pid: int
    heard_at: float
    version: int = -1
    credit: int = 0
    """Items it said it can take since its hello."""
    given: int = 0
    """Items it was given since its hello."""
    gauges: dict[str, float] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """Items it can take now."""
        return self.credit - self.given


class Members:
    """The live actors. A newer incarnation fences the one that had its name."""

    def __init__(self) -> None:
        self._by_identity: dict[str, Member] = {}
        self._retired: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        """Name of a member that died to how; cleared when it is back."""

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_identity.values()))

    def get(self, identity: str) -> Member | None:
        """The live member with this identity."""
        return self._by_identity.get(identity)

    def fenced_by(self, identity: str) -> str | None:
        """The identity that replaced ``identity``, if one did."""
        return self._retired.get(identity)

    def of_kind(self, kind: ActorKind) -> list[Member]:
        """The live members of a kind."""
        return [member for member in self._by_identity.values() if member.kind == kind]

    def join(self, identity: str, hello: Hello, now: float) -> Member | None:
        """Admits ``identity``; returns the older incarnation that it replaces. A member that says hello again starts
        again from nothing, since it may have missed anything."""
        older = next((m for m in self if m.name == hello.name), None)
        if older:
            del self._by_identity[older.identity]
            if older.identity != identity:
                self._retired[older.identity] = identity
        self.lost.pop(hello.name, None)
        self._by_identity[identity] = Member(
            identity, hello.name, hello.kind, hello.host, hello.pid, now, version=hello.version
        )
        return older

    def leave(self, identity: str) -> Member | None:
        """The member has said goodbye."""
        return self._by_identity.pop(identity, None)

    def silent(self, now: float, dead_after_s: float) -> list[Member]:
        """Members not heard from for too long, removed."""
        dead = [m for m in self if now - m.heard_at > dead_after_s]
        for member in dead:
            del self._by_identity[member.identity]
            self.lost[member.name] = f"silent for {dead_after_s:g} s"
        return dead
