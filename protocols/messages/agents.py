"""Turns of agents outside the pipeline, from gateways through the broker to rollouts, and what is kept of sessions."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from penstock.protocols.experience import Branches, Bytes, Finish, Prompt, Purpose, Sampling
from penstock.protocols.messages.base import Message

NOTE, SESSION = "note", "session"
MOST_WAIT_S = 300.0
"""That a gateway waits for a session to be free before it says that none is."""
UNANSWERED = "rollouts, of which none has answered"
"""How `TurnAnswer.error` ends where a turn may be answered when it is asked for again."""


def session_name(purpose: str, number: int, place: int, life: int) -> str:
    """What agents call the session of that ``place`` in group ``number``. Another life has another name."""
    return f"{purpose}-{number}-{place}-{life}"


class TurnKey(BaseModel):
    """One turn of the policy in one session. Numbers are never used for another turn."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    purpose: Purpose
    number: int
    """The group's."""
    place: int
    """Of the session in the group."""
    turn: int

    @property
    def note_record(self) -> str:
        """What its `TurnRequest.note` is called among the records of its group."""
        return f"{NOTE}.{self.place}.{self.turn}"

    @property
    def answer_record(self) -> str:
        """What its answer is called there."""
        return f"answer.{self.place}.{self.turn}"

    @property
    def reward_record(self) -> str:
        """What is kept there of what its agent has said that it was worth."""
        return f"reward.{self.place}.{self.turn}"

    @classmethod
    def of_note(cls, purpose: Purpose, number: int, record: str) -> TurnKey | None:
        """The turn whose note is called so; None where ``record`` is something else."""
        kind, *rest = record.split(".")
        return cls(purpose=purpose, number=number, place=int(rest[0]), turn=int(rest[1])) if kind == NOTE else None


class TurnRequest(Message):
    """gateway → broker: have the policy say this turn. Answered by `TurnAnswer` once that is durable. Asked again, it
    has the same answer."""

    key: TurnKey
    prompt: Bytes
    """int32 tokens, as bytes: all that comes before the turn."""
    sampling: Sampling
    stream: int
    """What its sampling is keyed by."""
    known: int = Field(0, ge=0)
    """Tokens at the prompt's beginning whose experts an earlier answer says."""
    pictures: list[Bytes] = []
    """What the prompt shows, in its order."""
    sampled: Bytes | None = None
    """bool, as bytes: which of the prompt's tokens the policy has said; None: it shows nothing."""
    note: Bytes
    """The gateway's own, kept with the answer for a gateway that takes the session over."""


class TurnAnswer(Message):
    """broker → gateway: `turns.answers.pack_answer`, or why the engine never will answer."""

    answer: Bytes
    error: str = ""


class Generate(Message):
    """broker → rollout: one turn, by a number of the broker's own."""

    id: int
    seed: int
    prompt: Bytes
    sampling: Sampling
    stream: int
    known: int = Field(0, ge=0)
    pictures: list[Bytes] = []
    sampled: Bytes | None = None
    unread: bool = False
    """Nobody computes with its log-probabilities: it is an evaluation's."""


class Unwanted(Message):
    """broker → rollout: nobody waits for these turns any more."""

    ids: list[int]


class Generated(Message):
    """rollout → broker: the turn's answer. Answered by `Ack` once it is durable."""

    id: int
    answer: Bytes
    oldest: int
    """The lowest version among its tokens; and the highest."""
    newest: int
    error: str = ""


class Note(Message):
    """gateway → broker: remember this of a group that it holds. Answered by `Ack` once it is durable."""

    purpose: Purpose
    number: int
    name: str
    data: Bytes


class GiveBack(Message):
    """gateway → broker: nobody is at this group here: another may have it, with all that is kept of it. Answered by
    `Ack` once that is durable."""

    purpose: Purpose
    number: int


class AgentOpen(Message):
    """agent → gateway: the next task of the run that no agent has. Answered by `AgentOpened`."""

    wait_s: float = Field(ge=0, le=MOST_WAIT_S, allow_inf_nan=False)


class AgentOpened(Message):
    """gateway → agent: a session."""

    session: str
    base_url: str
    """Where it is reached by what speaks OpenAI's or Anthropic's API."""
    purpose: Purpose
    task: Prompt
    turn_s: float
    """How long a turn may take before its agent is told to ask again."""


class AgentChat(Message):
    """agent → gateway: what does the policy answer? Answered by `AgentReply`."""

    session: str
    request: str
    """The same where it is asked again."""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """What the chat template is told beside them, over what the run and the task say."""
    max_tokens: int | None = None
    stop: list[str] = []


class AgentReply(Message):
    """gateway → agent: the policy's answer."""

    turn: int
    message: dict[str, Any]
    """As chat completions have it: ``content``, ``tool_calls``."""
    finish: Finish
    tokens: Bytes
    """int32; with the two beside it as bytes."""
    logprobs: Bytes
    versions: Bytes
    engine_s: float
    """Seconds that the rollout's engine had the turn."""


class AgentGenerate(Message):
    """agent → gateway: what does the policy say behind these tokens? Answered by `AgentReply`."""

    session: str
    request: str
    tokens: Bytes
    """int32, as bytes: everything before the answer."""
    max_tokens: int | None = None


class AgentReward(Message):
    """agent → gateway: what one turn was worth. Said again, it replaces what was said. Answered by `Ack` once it is
    durable."""

    session: str
    reward: float
    turn: int | str | None = None
    """Its number, or the id of what answered it; None: the newest that its agent has had."""


class AgentFinish(Message):
    """agent → gateway: done; without a reward the reward functions say how good it was. Answered by `Ack`."""

    session: str
    reward: float | None = None
    metrics: dict[str, float] = {}
    """Whatever else the agent has measured, by name."""
    turn_rewards: dict[str, float] = {}
    """As of `AgentReward`, of several turns by number or id."""
    truncated: bool = False
    """It was cut off: its last turn had no room for another, or there was none left."""
    branches: Branches = "shared"


class AgentAbandon(Message):
    """agent → gateway: another may try. Answered by `Ack`."""

    session: str
    reason: str


class AgentBeat(Message):
    """agent → gateway, unasked: alive, with these sessions."""

    sessions: list[str] = Field(max_length=1 << 16)


class AgentRefused(Message):
    """gateway → agent: as over HTTP: a status, a word for programs, a sentence for people."""

    status: int
    code: str
    reason: str
    retry_s: float = 0.0
