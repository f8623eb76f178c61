"""Every message between actors, by who says it. A field that a message does not declare is refused."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from protocols.experience import Bytes, Floats, Prompt, Sampling
from protocols.weights import Manifest, Route
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


class Publish(Message):
    """trainer → broker: offer ``version`` to the rollouts with the identities ``targets``."""

    version: int
    manifest: Manifest
    route: Route
    targets: list[str]


class Offer(Message):
    """broker → rollout: load this version."""

    version: int
    manifest: Manifest
    route: Route


class Loaded(Message):
    """rollout → broker, told on to the trainer: ``version`` is verified and serves. ``pause_s`` is how long decoding
    stood still for it."""

    version: int
    digest: str
    receive_s: float
    verify_s: float
    pause_s: float


class LoadFailed(Message):
    """rollout → broker, told on to the trainer: ``version`` was not loaded."""

    version: int
    error: str


class Receivers(Message):
    """broker → trainer, whenever it changes: each live rollout's identity and what it serves: version and digest,
    -1 and "" for nothing of the present timeline. Both count: a step that changes nothing is a new version too."""

    serves: dict[str, tuple[int, str]]


class ReceiverReport(Message):
    """broker → trainer: what became of an offer."""

    receiver: str
    """The rollout's identity."""
    version: int
    digest: str = ""
    error: str | None = None
    pause_s: float = 0.0


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
