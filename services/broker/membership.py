"""Who is here: members by name, one incarnation each, with their credit and the version they serve."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass, field

from penstock.protocols.mailbox import is_yet_to_come
from penstock.protocols.messages import CommitVersion, Hello, Propose
from penstock.services.broker.rules.journal import Journal

LOST_S = 600.0
"""So long it is told who is lost. Who comes in its place may have another name, and this one never comes back."""


class MembershipError(ValueError):
    """A hello that cannot be admitted; says why."""


@dataclass(slots=True)
class Member:
    """One live actor."""

    identity: str
    """``name#incarnation``"""
    name: str
    kind: str
    host: str
    pid: int
    heard_at: float
    version: int = -1
    digest: str = ""
    hello: int = 0
    """Which of its hellos this membership began with; credit is counted from it."""
    credit: int = 0
    """Items it said it can take since its hello."""
    given: int = 0
    """Items it was given since its hello."""
    gauges: dict[str, float] = field(default_factory=dict)
    offered: list[Propose | CommitVersion] = field(default_factory=list)
    """What a rollout was told last of a version, and has not answered: see `offers`."""

    @property
    def room(self) -> int:
        """Items it can take now."""
        return self.credit - self.given


class Members:
    """The live actors. A newer incarnation fences the one that had its name; which is the newest is durable."""

    TABLE = "incarnations"

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._by_identity: dict[str, Member] = {}
        rows = journal.rows(self.TABLE)
        self._newest = {name: row["incarnation"] for name, row in rows.items()}
        self._returns = {name: row["returns"] for name, row in rows.items()}
        self._gone = {name for name, row in rows.items() if row.get("gone")}
        """Names of those that have said goodbye: whoever has such a name next has not died before."""
        self.lost: dict[str, float] = {}
        """Name of an actor that died to when it was last heard; cleared when it is back, and after `LOST_S`."""

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_identity.values()))

    def get(self, identity: str) -> Member | None:
        """The live member with this identity."""
        return self._by_identity.get(identity)

    def fenced_by(self, identity: str) -> str | None:
        """The identity that replaced ``identity``, if one did."""
        name, _, incarnation = identity.rpartition("#")
        newest = self._newest.get(name, "")
        if incarnation >= newest or (f"{name}#{newest}" not in self._by_identity and is_yet_to_come(newest)):
            return None
        return f"{name}#{newest}"

    @property
    def returns(self) -> int:
        """How often actors of a name came back as another process, but for those that had said goodbye."""
        return sum(self._returns.values())

    def of_kind(self, kind: str) -> list[Member]:
        """The live members of a kind."""
        return [member for member in self._by_identity.values() if member.kind == kind]

    def join(
        self, identity: str, hello: Hello, now: float, kinds: Set[str], single: Collection[str] = ()
    ) -> Member | None:
        """Admits ``identity``, where it is of one of these ``kinds``, of which some are ``single``: a run has one of
        it, which is called by its kind. Returns the older incarnation that it replaces, or its own former membership:
        one that says hello again may have missed anything, and starts from nothing."""
        name, _, incarnation = identity.rpartition("#")
        if hello.name != name:
            raise MembershipError(f"{identity} says hello as {hello.name!r}")
        if hello.kind not in kinds:
            raise MembershipError(
                f"{hello.kind!r} is no actor of this run; it has {', '.join(sorted(kinds))}: was it started with the "
                "run's own config?"
            )
        if hello.kind in single and name != hello.kind:
            raise MembershipError(
                f"a run has one {hello.kind}, which is called {hello.kind}, and not {name}: leave --name out; "
                "the newer of two takes the older one's place"
            )
        older = next((m for m in self if m.name == name), None)
        if older:
            del self._by_identity[older.identity]
        if hello.kind == "observer":
            self._newest[name] = incarnation
        elif self._newest.get(name) != incarnation:
            self._returns[name] = self._returns.get(name, -1) + (name not in self._gone)
            self._gone.discard(name)
            self._newest[name] = incarnation
            self._journal.put(self.TABLE, name, {"incarnation": incarnation, "returns": self._returns[name]})
        self.lost.pop(name, None)
        member = Member(identity, name, hello.kind, hello.host, hello.pid, now)
        member.version, member.digest, member.hello = hello.version, hello.digest, hello.number
        self._by_identity[identity] = member
        return older

    def leave(self, identity: str) -> Member | None:
        """The member has said goodbye."""
        member = self._by_identity.pop(identity, None)
        if member and member.kind != "observer":
            row = {"incarnation": self._newest[member.name], "returns": self._returns[member.name], "gone": True}
            self._gone.add(member.name)
            self._journal.put(self.TABLE, member.name, row)
        return member

    def excuse(self, seconds: float, now: float) -> None:
        """The broker itself was away: its silence is not theirs."""
        for member in self._by_identity.values():
            member.heard_at = min(now, member.heard_at + seconds)

    def silent(self, now: float, dead_after_s: float) -> list[Member]:
        """Members not heard from for too long, removed."""
        dead = [m for m in self if now - m.heard_at > dead_after_s]
        for member in dead:
            del self._by_identity[member.identity]
            if member.kind != "observer":
                self.lost[member.name] = member.heard_at
        self.lost = {name: heard_at for name, heard_at in self.lost.items() if now - heard_at < LOST_S}
        return dead
