"""A version's way from the trainer to the rollouts: see `protocols.weight_channel`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from penstock.protocols.experience import Bytes
from penstock.protocols.messages.base import Message
from penstock.protocols.versions import Digests, Layout, Route, Share, Transport


class Relayed(Message):
    """broker → trainer: what you said was passed on, but not to the ``absent``, who are not here."""

    absent: list[str]


class Invite(Message):
    """trainer → rollouts, through the broker: this is what my versions look like; say how you can be reached. The
    rollout answers `Reach`; the broker answers this and the messages below with `Relayed`."""

    targets: list[str]
    """Identities of the rollouts that it is for; so in all messages below."""
    probe: str
    """Name of a shared-memory file that holds a nonce."""
    layout: Layout
    """Of every version that this trainer publishes."""
    key: Bytes
    """Of the digests of this run's versions (`protocols.digests.Gmac`)."""


class Place(BaseModel):
    """Where a process that holds an engine's weights is."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    nonce: str
    """What it read from the probe; empty where it does not see it."""
    host: str
    """Its address on the weight network."""
    gpu: str = ""
    """UUID of the GPU that it computes on; empty for a CPU."""


class Reach(Message):
    """rollout → trainer: where this rollout's weights are."""

    receiver: str = ""
    """Its identity, written by the broker; so in all messages below."""
    layout: str
    """Digest of the layout that it was invited with."""
    places: list[Place]
    """Of the rollout itself, or of each worker of its engine, in the order of their ranks."""
    newest: int = -1
    """The highest epoch that it has seen: a trainer whose clock is behind goes on above that."""
    only: Transport | None = None
    """The one transport that its config names."""


class Propose(Message):
    """trainer → rollouts: ``version`` is on its way by ``route``; open a shadow."""

    targets: list[str]
    epoch: int
    version: int
    layout: str
    """Digest of the layout that the invitation brought."""
    route: Route
    snapshots: str
    """Where missing buckets are asked for, e.g. ``tcp://10.0.0.1:4242``."""
    advertised: str | None = None
    """The same place, for rollouts that ask for whole versions there; null: as for all."""
    share: Share | None = None
    """A rollout tells it to each of its engine's workers, where they hold the version together."""

    def place_for(self, transport: str) -> str:
        """Where a rollout asks whose config names this ``transport``."""
        return self.advertised if transport == "snapshot" and self.advertised else self.snapshots


class Canary(BaseModel):
    """A sequence and the log-probabilities of all but its first token under the trainer's weights."""

    model_config = ConfigDict(extra="forbid")
    tokens: list[int]
    logprobs: list[float]
    tolerance: float
    """Largest mean absolute difference."""


class PublishCost(BaseModel):
    """What making a version ready took in the trainer."""

    model_config = ConfigDict(extra="forbid")
    gather_s: float = 0.0
    """Gathering, casting, copying, and hashing where that is done while copying; finding what changed."""
    digest_s: float = 0.0
    """Hashing what was gathered last, where a thread hashes beside gathering."""
    transfer_s: float = 0.0
    """From the first broadcast until the last was done; 0 where nothing was broadcast."""
    bytes_sent: int = 0
    """Broadcast to each receiver."""
    density: float = 1.0
    """Share of the elements that changed; 1 where that was not looked at."""


class CommitVersion(Message):
    """trainer → rollouts: ``version`` is all there, and this is what it must hash to. The broker makes it durable that
    the version exists before it passes this on."""

    targets: list[str]
    epoch: int
    version: int
    digests: Digests
    canary: Canary | None = None


class Published(Message):
    """trainer → broker, unasked: ``version`` is out; what that took."""

    version: int
    cost: PublishCost


class Loaded(Message):
    """rollout → trainer, which the broker leases by: ``version`` is verified and serves."""

    receiver: str = ""
    epoch: int
    version: int
    digest: str
    transport: Transport
    bytes_received: int = 0
    buckets_again: int = 0
    """Buckets that were missing or wrong and came from the snapshot."""
    receive_s: float = 0.0
    verify_s: float = 0.0
    prepare_s: float = 0.0
    """Turning the bytes into what the engine computes with, and scoring the canary."""
    canary: float = 0.0
    """Mean absolute difference of the canary's log-probabilities."""
    pause_s: float = 0.0
    """How long decoding stood still for the swap."""


class LoadFailed(Message):
    """rollout → trainer: ``version`` was not loaded; what was served before still is."""

    receiver: str = ""
    epoch: int
    version: int
    error: str


class Receivers(Message):
    """broker → trainer, whenever it changes: each live rollout's identity and what it serves: version and digest,
    -1 and "" for nothing of the present timeline. Both count: a step that changes nothing is a new version too."""

    serves: dict[str, tuple[int, str]]


class Fetch(Message):
    """rollout → trainer's snapshot port: send me this bucket. Answered by `Bucket`."""

    version: int
    digest: str
    index: int
    held: str
    """Digest of the version that it can apply changes to; empty for none."""


class Bucket(Message):
    """trainer → rollout: one bucket of a version."""

    version: int
    index: int
    encoding: Literal["whole", "gap-ulp"]
    data: Bytes
