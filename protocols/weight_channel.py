"""The weight channel's protocol, as two state machines without a socket: the trainer's `PublishState`, a rollout's
`VersionAssembly`.

    trainer                          broker                            rollout
      │ Invite(layout, nonce segment) ▶ passes on ────────────────────▶ reads the nonce, if it sees it
      │ ◀─────────────────────────────  passes on  ◀───────────────────  Reach(nonce, GPU, host)
      │ Propose(epoch, version, route) ───────────────────────────────▶ opens a shadow
      │ ═══ buckets, each gathered and sent while the next is gathered ═▶ hashes each as it comes
      │ CommitVersion(epoch, version, digests, canary) ▶ durable ─────▶ compares; asks again for what is wrong
      │                                                                 scores the canary with the shadow
      │                                                                 swaps between two decoding steps
      │ ◀──────────────────────────────  leases at it  ◀───────────────  Loaded(version, digest) | LoadFailed(error)

A receiver's states, as the sender sees it:

    state      | leaves by                          | to
    -----------|------------------------------------|----------------------------------------------
    stranger   | Reach                              | ready (a transport is chosen)
    ready      | a publish, or a seed where behind  | loading (epoch, version)
    loading    | Loaded                             | ready
    loading    | LoadFailed                         | ready, after a pause that grows
    loading    | the deadline                       | stranger: voted out, invited again after a pause;
               |                                    | its Loaded still says how long it takes
    any        | the broker finds it dead           | gone

An epoch is a membership: who takes part in a publish, and by which route. It has a new number whenever that changes or
something failed, so a group of processes that broke is never used again. A seed, of a rollout that came late or failed,
is an epoch of one, served from the snapshot of the latest version; nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from penstock.protocols.digests import Gmac
from penstock.protocols.versions import DigestError, Digests, Layout, Share, Transport

INVITE_AGAIN_S = 2.0
RETRY_S = 0.1
UNMET = 2
"""So often running a receiver may miss its group; then it asks for versions by itself."""
MEET_AGAIN_S = 600.0
"""Until another group is tried with it; twice as long each time."""


@dataclass(slots=True)
class Peer:
    """One rollout, as the trainer sees it."""

    identity: str
    serves: tuple[int, str] = (-1, "")
    """Version and digest."""
    transport: Transport | None = None
    """None: a stranger."""
    invite_at: float = 0.0
    loading: tuple[int, int] | None = None
    """Epoch and version that were proposed to it and not answered yet."""
    since: float = 0.0
    late: dict[tuple[int, int], float] = field(default_factory=dict)
    """What it was voted out of, by epoch and version, and may be loading still: since when."""
    slowest_s: float | None = None
    """The longest that it has taken to load a version; None: not known, or no measure any more."""
    failures: int = 0
    again_at: float = 0.0
    unmet: int = 0
    """Groups running that it was in, and that did not meet."""
    alone: int = 0
    """How often it was taken out of groups."""
    meet_at: float | None = None
    """When its transport is chosen anew, where it was taken out of them."""

    @property
    def pause_s(self) -> float:
        """After so many failures; grows without end."""
        return RETRY_S * 2 ** min(self.failures, 30)  # more is no float


@dataclass(frozen=True)
class Epoch:
    """One membership."""

    number: int
    members: dict[str, Transport]

    def by(self, *transports: Transport) -> list[str]:
        """The members that one of ``transports`` reaches, sorted: a member's place is its rank, counted from 1."""
        return sorted(identity for identity, transport in self.members.items() if transport in transports)


@dataclass(frozen=True)
class Late:
    """A receiver that was voted out."""

    identity: str
    epoch: int
    version: int
    waited_s: float


class PublishState:
    """Who is offered what, and when. Times are seconds on one clock of the caller's. ``patience_s`` says how long a
    rollout may take to answer, from the longest that it has taken, None where that is not known."""

    def __init__(self, first_epoch: int, patience_s: Callable[[float | None], float]) -> None:
        self.peers: dict[str, Peer] = {}
        self.latest: tuple[int, str] | None = None
        """The newest version that was committed, and its digest: what everybody should serve."""
        self._patience_s = patience_s
        self._next = first_epoch
        self._epoch = Epoch(-1, {})
        self._broken = True

    def present(self, serves: dict[str, tuple[int, str]]) -> None:
        """The rollouts that live, and what each serves."""
        for identity in self.peers.keys() - serves.keys():
            del self.peers[identity]
        for identity, served in serves.items():
            peer = self.peers.setdefault(identity, Peer(identity))
            peer.serves = served
            if peer.loading and peer.loading[1] == served[0] and served == self.latest:
                peer.loading, peer.failures = None, 0  # its word of it was lost with a line

    def invitations(self, now: float) -> list[str]:
        """Strangers to invite now."""
        for peer in self.peers.values():
            if peer.meet_at is not None and now >= peer.meet_at and not peer.loading:
                peer.transport = peer.meet_at = None
        due = [p for p in self.peers.values() if p.transport is None and now >= p.invite_at]
        for peer in due:
            peer.invite_at = now + INVITE_AGAIN_S
        return [peer.identity for peer in due]

    def reached(self, identity: str, transport: Transport) -> bool:
        """An invited stranger has answered and is to be served by ``transport``. False where it is none."""
        peer = self.peers.get(identity)
        if peer is None or peer.transport is not None:
            return False
        peer.transport, peer.meet_at = transport, None
        return True

    def after(self, epoch: int) -> None:
        """A rollout has seen this one, of another trainer: it refuses what is not above it."""
        if epoch >= self._next:
            self._next, self._broken = epoch + 1, True

    def open(self, version: int, now: float) -> Epoch:
        """The epoch that ``version`` is published in: everyone who is ready. The others are seeded when they are."""
        ready = [p for p in self.peers.values() if self._ready(p, now)]
        members: dict[str, Transport] = {p.identity: p.transport for p in ready if p.transport}
        if self._broken or members != self._epoch.members:
            self._epoch, self._broken = Epoch(self._number(), members), False
        for peer in ready:
            peer.loading, peer.since = (self._epoch.number, version), now
        return self._epoch

    def met(self, now: float, missed: Collection[str] = ()) -> list[str]:
        """The epoch's members have a group, or, those that ``missed`` theirs, have none: their time to load begins,
        however long it took to meet. Returns who has missed it so often that it asks for versions by itself for a
        while: nobody can tell which of a group's members cannot be reached, and each publish would wait for it."""
        alone: list[str] = []
        for peer in self.peers.values():
            if not peer.loading or peer.loading[0] != self._epoch.number:
                continue
            peer.since = now
            peer.unmet = peer.unmet + 1 if peer.identity in missed else 0
            if peer.unmet >= UNMET:
                peer.transport, peer.unmet, self._broken = "snapshot", 0, True
                peer.meet_at = now + MEET_AGAIN_S * 2 ** min(peer.alone, 10)
                peer.alone += 1
                alone.append(peer.identity)
        return alone

    def committed(self, version: int, digest: str) -> None:
        """``version`` is the one to serve from now on."""
        self.latest = version, digest

    def seeds(self, now: float) -> list[tuple[str, int, Transport]]:
        """Who is behind the latest version and ready for it: identity, an epoch of its own, transport."""
        if self.latest is None:
            return []
        chosen: list[tuple[str, int, Transport]] = []
        for peer in self.peers.values():
            if peer.serves == self.latest or not self._ready(peer, now):
                continue
            peer.loading, peer.since = (self._number(), self.latest[0]), now
            if peer.identity in self._epoch.members:  # it has seen a higher number than its epoch's by now
                self._broken = True
            assert peer.transport
            chosen.append((peer.identity, peer.loading[0], peer.transport))
        return chosen

    def loaded(self, identity: str, epoch: int, version: int, digest: str, now: float) -> float | None:
        """The receiver serves it. Returns how long that took; None for old news."""
        peer = self.peers.get(identity)
        if peer is None or (peer.loading != (epoch, version) and (epoch, version) not in peer.late):
            return None
        took_s = now - (peer.since if peer.loading == (epoch, version) else peer.late[epoch, version])
        peer.serves = version, digest
        peer.late = {at: since for at, since in peer.late.items() if at[1] > version}
        if peer.loading and peer.loading[1] == version:  # also where it was offered again meanwhile
            peer.loading, peer.failures = None, 0
        peer.slowest_s = max(peer.slowest_s or 0.0, took_s)
        return took_s

    def failed(self, identity: str, epoch: int, version: int, now: float) -> bool:
        """The receiver could not load it, and is offered the latest again after a while. False for old news."""
        peer = self.peers.get(identity)
        if peer is None or peer.loading != (epoch, version):
            return False
        peer.loading, self._broken = None, True
        peer.failures += 1
        peer.again_at = now + min(peer.pause_s, self._patience_s(peer.slowest_s))
        if peer.transport == "shm" and peer.failures > 1:  # it may not see the trainer's memory any more
            peer.transport, peer.invite_at = None, peer.again_at
        return True

    def broken(self) -> None:
        """Something of the present epoch failed: the next publish has a new one."""
        self._broken = True

    def late(self, now: float) -> list[Late]:
        """Votes out whoever has not answered within the deadline."""
        out: list[Late] = []
        for peer in self.peers.values():
            patience_s = self._patience_s(peer.slowest_s)
            if peer.loading and now - peer.since > patience_s:
                out.append(Late(peer.identity, *peer.loading, now - peer.since))
                peer.late[peer.loading] = peer.since
                peer.loading, peer.transport, self._broken = None, None, True
                peer.failures += 1
                peer.slowest_s = None  # it may be slower now than it was
                peer.invite_at = now + min(peer.pause_s, patience_s)
        return out

    def _ready(self, peer: Peer, now: float) -> bool:
        return peer.transport is not None and peer.loading is None and now >= peer.again_at

    def _number(self) -> int:
        self._next += 1
        return self._next - 1


class BucketError(DigestError):
    """A bucket that is refused; says why."""


@dataclass
class VersionAssembly:
    """What has arrived of one proposal, and whether it is right. Nothing is served before `whole` has said so."""

    epoch: int
    version: int
    layout: Layout
    gmac: Gmac
    found: dict[int, str] = field(default_factory=dict)
    """Bucket to the digest of what arrived."""
    expected: Digests | None = None
    """None until the commit."""
    share: Share | None = None
    """Where others receive and prove the rest of it."""

    def bucket(self, epoch: int, version: int, index: int, data: memoryview, digest: str | None = None) -> None:
        """Bucket ``index`` has arrived in the shadow. Raises `BucketError` where it is not one that is wanted: then its
        place counts as empty, or, for a repeated one, as it was."""
        if (epoch, version) != (self.epoch, self.version):
            raise BucketError(
                f"bucket {index} of epoch {epoch}, version {version} is refused: epoch {self.epoch}, "
                f"version {self.version} is being received"
            )
        if not 0 <= index < len(self.layout.spans):
            raise BucketError(f"bucket {index} is refused: there are {len(self.layout.spans)}")
        if index not in self.wanted:
            raise BucketError(f"bucket {index} is refused: it is another worker's")
        if index in self.found:
            raise BucketError(f"bucket {index} is refused: it is here already")
        start, end = self.layout.spans[index]
        if len(data) != end - start:
            raise BucketError(f"bucket {index} is refused: {len(data)} bytes arrived, it has {end - start}")
        found = self.gmac.bucket(data) if digest is None else digest
        if self.expected and found != self.expected.buckets[index]:
            raise BucketError(
                f"bucket {index} is refused: its digest is {found}, the manifest declares "
                f"{self.expected.buckets[index]}"
            )
        self.found[index] = found

    def commit(self, epoch: int, version: int, digests: Digests) -> dict[int, str]:
        """The manifest. Returns the buckets that are wrong, each with its reason: their places are empty again. Raises
        `DigestError` where the manifest contradicts itself or belongs to another proposal."""
        if (epoch, version) != (self.epoch, self.version):
            raise DigestError(f"the commit of epoch {epoch}, version {version} is not for {self.epoch}, {self.version}")
        if len(digests.buckets) != len(self.layout.spans):
            raise DigestError(f"{len(digests.buckets)} bucket digests for {len(self.layout.spans)} buckets")
        whole = self.gmac.whole(self.layout.digest, digests.buckets)
        if whole != digests.whole:
            raise DigestError(f"the version has digest {whole}, the manifest declares {digests.whole}")
        self.expected = digests
        wrong = {
            index: f"its digest is {digest}, the manifest declares {digests.buckets[index]}"
            for index, digest in self.found.items()
            if digest != digests.buckets[index]
        }
        for index in wrong:
            del self.found[index]
        return wrong

    @cached_property
    def wanted(self) -> range:
        """The buckets that are this receiver's."""
        number = len(self.layout.spans)
        return self.share.buckets(number) if self.share else range(number)

    @property
    def missing(self) -> list[int]:
        """Of those that are wanted, the buckets that have not arrived, or were wrong."""
        return [index for index in self.wanted if index not in self.found]

    def whole(self) -> str | None:
        """The version's digest, once every bucket that is wanted is here and right; None before."""
        if self.expected is None or self.missing:
            return None
        return self.expected.whole


def name_buckets(wrong: Iterable[int]) -> str:
    """Bucket numbers for a message."""
    numbers = list(wrong)
    return ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
