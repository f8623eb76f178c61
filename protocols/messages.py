"""Every message between actors, by who says it. A field that a message does not declare is refused."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from protocols.experience import Bytes, Floats, Prompt, Sampling
from protocols.weights import Digests, Layout, Route, Transport
from protocols.wire import Envelope, WireError

ActorKind = Literal["rollout", "reward", "reference", "trainer", "observer"]

EVALUATION = -1
"""Group numbers at or below this are evaluation prompts: scored, never trained on."""


class Message(BaseModel):
    """A body on the wire; its type is the class's name."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)
    registry: ClassVar[dict[str, type[Message]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.registry[cls.__name__] = cls


def to_envelope(message: Message, id: int = 0, reply_to: int = 0) -> Envelope:
    """``message`` ready for `wire.encode`."""
    return Envelope(type(message).__name__, id, reply_to, message.model_dump())


def from_envelope(envelope: Envelope) -> Message:
    """The message in ``envelope``. Raises `WireError` on an unknown type or a body that breaks its model."""
    model = Message.registry.get(envelope.type)
    if model is None:
        raise WireError(f"unknown message type {envelope.type[:80]!r}")
    try:
        return model.model_validate(envelope.body)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
        raise WireError(f"{envelope.type}: {problems}") from None


# --- life: every actor and the broker -------------------------------------------------------------------------------


class Hello(Message):
    """actor → broker: this incarnation of the actor is here. Answered by `Welcome`; fences older incarnations."""

    kind: ActorKind
    name: str
    host: str
    pid: int
    version: int = -1
    """The version of the weights that a rollout serves or a trainer holds; -1 for none."""
    digest: str = ""
    """The digest of that version."""
    holding: list[int] = []
    """Groups that this very process works on."""
    number: int = 0
    """Counts this process's hellos."""


class Welcome(Message):
    """broker → actor: you are a member."""

    run: str
    heartbeat_s: float


class Heartbeat(Message):
    """actor → broker, unasked: alive, with gauges for the dashboard."""

    gauges: dict[str, float] = {}
    holding: list[int] = []
    """Groups that it works on: their leases and offers are renewed, others expire."""


class Pulse(Message):
    """broker → actor: heard your heartbeat."""


class Bye(Message):
    """actor → broker: leaving in good order; what it held is free again."""

    reason: str


class HelloNeeded(Message):
    """broker → actor: you are not a member (any more); say hello."""


class Fenced(Message):
    """broker → actor: a newer incarnation has your name; stop."""

    by: str


class Refused(Message):
    """Any answer that is not the one hoped for: ``code`` for programs, ``reason`` for people."""

    code: Literal["bad_message", "not_allowed", "not_ready", "failed"]
    reason: str


class Noted(Message):
    """broker → actor: what you said is durable."""


class Stop(Message):
    """broker → actor: finish what you hold and exit 0."""

    reason: str


class Credit(Message):
    """actor → broker: this actor can take ``total`` items since hello number ``hello`` (groups for a rollout, work for
    a scorer). A running total, so that a lost or repeated message does no harm."""

    total: int
    hello: int = 0


# --- rollout ---------------------------------------------------------------------------------------------------------


class Lease(Message):
    """broker → rollout: generate group ``number``. The same number with a higher attempt is the same group again."""

    number: int
    attempt: int
    seed: int
    prompt: Prompt
    sampling: Sampling


class Finished(Message):
    """rollout → broker: a finished group (`experience.pack_group`). Answered by `Noted` once it is durable."""

    number: int
    attempt: int
    experience: Bytes


class Failed(Message):
    """rollout → broker: this prompt cannot be generated from, for a reason that trying again will not mend."""

    number: int
    attempt: int
    error: str


# --- reward and reference --------------------------------------------------------------------------------------------


class WorkItem(BaseModel):
    """One finished group to score."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    number: int
    experience: Bytes


class Work(Message):
    """broker → reward, reference: score these."""

    items: list[WorkItem]


class Score(BaseModel):
    """The rewards of one group, float32 ``[n]``; NaN where the reward failed, with its error."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    number: int
    rewards: Floats
    errors: list[str | None]


class Scored(Message):
    """reward → broker. Answered by `Noted`."""

    scores: list[Score]


class ReferenceScore(BaseModel):
    """Reference log-probabilities of one group, float32 ``[tokens of all]``, 0 where nothing was sampled."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    number: int
    logprobs: Floats


class Referenced(Message):
    """reference → broker. Answered by `Noted`."""

    scores: list[ReferenceScore]


# --- trainer ---------------------------------------------------------------------------------------------------------


class Take(Message):
    """trainer → broker: the groups of ``step``. Answered by `Batch`, by `Exhausted`, or by `Refused` (not_ready) that
    names the wait; the same step is answered with the same groups however often it is asked."""

    step: int


class TakenGroup(BaseModel):
    """One group of a batch, with everything that was said about it."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    number: int
    experience: Bytes
    rewards: Floats
    reference: Floats | None = None


class Batch(Message):
    """broker → trainer: what ``step`` trains on, lowest number first. Durable before it is sent."""

    step: int
    seed: int
    groups: list[TakenGroup]
    committed: int
    """Steps committed so far. A step below that is being redone: its version is not published again."""


class Exhausted(Message):
    """broker → trainer: there is no such step; ``steps`` is where the run ends."""

    steps: int
    reason: str


class LedgerRow(BaseModel):
    """One step as the trainer remembers it."""

    model_config = ConfigDict(extra="forbid")
    step: int
    groups: list[int]
    seed: int
    digest: str


class LedgerTail(Message):
    """trainer → broker, after every hello: the last steps that it knows to be committed. A broker whose store has lost
    some merges them. Answered by `Resumed`."""

    version: int
    steps: list[LedgerRow]


class Resumed(Message):
    """broker → trainer: ``committed`` steps are committed; one that holds an older version redoes the rest."""

    committed: int


class Commit(Message):
    """trainer → broker: ``step`` is trained and yields version ``step + 1``. Answered by `Noted` once durable."""

    step: int
    digest: str
    metrics: dict[str, float]


class Checkpointed(Message):
    """trainer → broker: a durable checkpoint of version ``version`` is at ``path``."""

    version: int
    path: str
    final: bool = False


# --- weights ---------------------------------------------------------------------------------------------------------


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


class Reach(Message):
    """rollout → trainer: where this rollout is."""

    receiver: str = ""
    """Its identity, written by the broker; so in all messages below."""
    layout: str
    """Digest of the layout that it was invited with."""
    nonce: str
    """What it read from the probe; empty where it does not see it."""
    host: str
    """Its address on the weight network."""
    gpu: str = ""
    """UUID of the GPU that its engine computes on; empty for a CPU."""
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
    cost: PublishCost | None = None
    """With a version's first commit."""


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


# --- observers -------------------------------------------------------------------------------------------------------


class StatusRequest(Message):
    """observer → broker."""


class Status(Message):
    """broker → observer: the live state, as the dashboard shows it."""

    state: dict[str, Any]


class LedgerRequest(Message):
    """observer → broker: what is not in the run's files yet."""


class LedgerReply(Message):
    """broker → observer: how many steps are committed, and the finished groups that no committed step has."""

    steps: int
    untrained: list[int]


class StopRun(Message):
    """observer → broker: end the run; everything drains and exits. ``seen``: this observer has read all it wants."""

    reason: str
    seen: bool = False
