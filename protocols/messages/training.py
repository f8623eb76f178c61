"""Steps that the trainer takes, commits and covers with checkpoints."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from penstock.protocols.experience import Bytes, Prompt, Values
from penstock.protocols.messages.base import Message
from penstock.protocols.messages.publishing import CommitVersion


class Take(Message):
    """learner → broker: the groups of ``step``. Answered by `Batch`, by `Exhausted`, or by `Refused` (not_ready) that
    names the wait; the same step is answered with the same groups however often, and by whomever, it is asked."""

    step: int
    after: list[int] = []
    """The groups of the step before, as this learner has trained on them; empty where it does not know."""


class HeldOutRequest(Message):
    """trainer → broker: rows whose own answers it measures the loss on (`prompts.eval_given`), from row ``begin`` of
    all on. Answered by `HeldOutRows`."""

    begin: int


class HeldOutRow(BaseModel):
    """A prompt with the answer that it brings, and the set that it is from."""

    model_config = ConfigDict(extra="forbid")
    set: str
    prompt: Prompt


class HeldOutRows(Message):
    """broker → trainer: some of them, without those that cannot be used. ``next`` is the row to ask for next, where
    there are ``more``."""

    rows: list[HeldOutRow]
    next: int
    more: bool


class EvalLoss(Message):
    """trainer → broker: the loss on held-out rows after ``step`` steps, by set, nats a token; and of sets of ``pairs``,
    whose loss is DPO's, ``preferred_likelier`` and ``preferred_margin``, as of a step. Answered by `Ack` once durable;
    said again, it changes nothing."""

    step: int
    sets: dict[str, float]
    pairs: dict[str, dict[str, float]] = {}


class TakenGroup(BaseModel):
    """One group of a batch, with everything that was said about it."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    number: int
    experience: Bytes
    columns: dict[str, Values]
    """Every column of the run that its prompt's source is asked for, by name (`columns.ColumnTable`)."""


class StepColumn(Message):
    """learner → broker: its column (`columns.Column.of_step`) of every group of ``step``, in the step's order. Answered
    by `Ack` once durable; said again, it changes nothing."""

    step: int
    column: str
    values: list[Values]


class Learned(Message):
    """learner → broker: one that publishes nothing, a critic, has trained ``step``. Answered by `Ack`."""

    step: int
    digest: str
    """Of the version that the step yielded; empty where the run is not deterministic."""
    metrics: dict[str, float]


class Batch(Message):
    """broker → learner: what ``step`` trains on, lowest number first. Durable before it is sent."""

    step: int
    seed: int
    max_lag: int
    """The bound that the step was taken under: no token is more versions old."""
    groups: list[TakenGroup]
    committed: int
    """Steps committed so far. A step below that is being redone: its version is not published again."""


class Skip(Message):
    """broker → a learner that follows the trainer and has asked for a batch: its next step is this one, as it is. What
    it has learned of later ones is of another store, or what it would learn of earlier ones is lost."""

    step: int


class Exhausted(Message):
    """broker → learner: there is no such step; ``steps`` is where the run ends."""

    steps: int
    reason: str


class LedgerRow(BaseModel):
    """One step as the trainer remembers it."""

    model_config = ConfigDict(extra="forbid")
    step: int
    groups: list[int]
    seed: int
    max_lag: int
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
    """trainer → broker: ``step`` is trained and yields version ``step + 1``. In one turn the step becomes durable, the
    version exists, and the rollouts are told its digests. Answered by `Relayed` once durable."""

    step: int
    groups: list[int]
    """What it was trained on: a store that has lost the step may have given others to it meanwhile."""
    digest: str
    metrics: dict[str, float]
    version: CommitVersion | None = None
    """None while steps are redone: rollouts hold newer versions already."""


class Checkpointed(Message):
    """learner → broker: a durable checkpoint of version ``version`` is at ``path``. Answered by `Keep`."""

    version: int
    path: str
    final: bool = False
    then_failed: str = ""
    """What the command for each checkpoint (`checkpoint.then`) could not do; empty: nothing."""


class Keep(Message):
    """broker → learner: checkpoints of these ``versions`` are, or may turn out to be, the one with the best
    evaluation."""

    versions: list[int]
