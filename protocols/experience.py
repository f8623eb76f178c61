"""Prompts, trajectories and groups: what a rollout makes and a trainer trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, Strict, field_validator, model_validator
from pydantic_core import core_schema

from penstock.protocols import routing as routes
from penstock.protocols.chat import as_chat, as_template_kwargs, as_tools, said
from penstock.protocols.routing import no_routing

Finish = Literal["stop", "length"]
Branches = Literal["shared", "own"]
"""What each branch of an agent's session is worth: all of it, as one answer, or its own turns alone, as an answer of
its own."""
Purpose = Literal["train", "eval"]
"""What a group is for. Groups of both live the same life; those for evaluation are never trained on."""

UNSAMPLED = -1
"""The version of a token that no policy sampled: a prompt's, or an environment's."""
ALONE = -1
"""The session of a trajectory that is no agent's."""


PICTURE = "<image>"
"""Stands in a prompt's words where it shows a picture."""
MOST_REWARD = 1e12
"""No reward is larger, nor what else a function gives: one would drown all others of its step, and the square of a
gradient that it makes is soon no float32 any more."""


class ExperienceError(ValueError):
    """A prompt, trajectory or group that breaks its own rules; says which one."""


def no_candidates() -> np.ndarray:
    """int32 ``[0]``: of a sampler whose choices were not recorded."""
    return np.zeros(0, np.int32)


def no_rewards() -> np.ndarray:
    """float32 ``[0]``: of a trajectory without an environment."""
    return np.zeros(0, np.float32)


class ArraySpec:
    """Makes pydantic check an array's dtype and number of dimensions. Arrays are never converted."""

    def __init__(self, dtype: str, dimensions: int) -> None:
        self.dtype, self.dimensions = dtype, dimensions

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def _check(self, value: Any) -> np.ndarray:
        if not isinstance(value, np.ndarray):
            raise ValueError(f"expected an array of {self.dtype}, got {type(value).__name__}")
        if value.dtype.name != self.dtype or value.ndim != self.dimensions:
            raise ValueError(
                f"expected {self.dtype} with {self.dimensions} dimensions, got {value.dtype.name} with {value.ndim}"
            )
        return value


class AnyArraySpec(ArraySpec):
    """Any dtype of the wire, one dimension: whoever knows the declaration checks it."""

    def __init__(self) -> None:
        super().__init__("any dtype", 1)

    def _check(self, value: Any) -> np.ndarray:
        if not isinstance(value, np.ndarray) or value.ndim != 1:
            raise ValueError(f"expected an array with one dimension, got {type(value).__name__}")
        return value


Bytes = Annotated[np.ndarray, ArraySpec("uint8", 1)]
"""An opaque payload: uint8 ``[bytes]``, so that a large one travels in a frame of its own."""
Values = Annotated[np.ndarray, AnyArraySpec()]
"""Of a column: `columns.Column` says the dtype and the size."""


def as_bytes(payload: bytes | memoryview) -> np.ndarray:
    """``payload`` as the uint8 array that messages carry, without a copy."""
    return np.frombuffer(payload, np.uint8)


class Prompt(BaseModel):
    """One task: what the policy is asked, and what its reward needs to judge the answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    index: int
    """Row of the data source."""
    text: str | None = None
    """A plain prompt. Exactly one of `text` and `messages` is given."""
    messages: list[dict[str, Any]] | None = None
    """A chat: maps with ``role`` and ``content``, and ``tool_calls`` as OpenAI has them, rendered by the tokenizer's
    template. Kept as `chat.as_chat` has them."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions that the template tells of; an environment's own take their place. None: none."""
    chat_template_kwargs: dict[str, Any] | None = None
    """What the template is told beside the messages, over what the run's config has it told; None:
    nothing."""
    truth: Any = None
    """Whatever the reward function compares with: text, numbers, lists and maps of them."""
    source: str = ""
    """Which of a mixture's sources it is from; empty: there is one."""
    answer: str | list[dict[str, Any]] | None = None
    """The row's own answer, for `rollout.given`: text, or, of a chat, messages that go on from it, the last of which is
    the assistant's. None: the row has none but its truth."""
    rejected: str | list[dict[str, Any]] | None = None
    """Another answer, of the same forms, that the row's own is preferred to, for `rollout.given.rejected`."""
    pictures: tuple[Annotated[bytes, Strict()], ...] = ()
    """What it shows, each a whole file of a common format (PNG, JPEG, WebP), in the order of the `PICTURE` marks in its
    words: as many as there are."""

    @field_validator("messages", "answer", "rejected", mode="before")
    @classmethod
    def _as_chat(cls, value: Any) -> Any:
        return as_chat(value) if isinstance(value, list) else value

    @field_validator("tools", mode="before")
    @classmethod
    def _as_tools(cls, value: Any) -> Any:
        return as_tools(value)

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _as_template_kwargs(cls, value: Any) -> Any:
        return as_template_kwargs(value)

    @model_validator(mode="after")
    def _has_one_form(self) -> Prompt:
        if (self.text is None) == (self.messages is None):
            raise ValueError("a prompt has either text or messages")
        if self.pictures and self.marks != len(self.pictures):
            raise ValueError(f"its words have {self.marks} times {PICTURE}, and its pictures are {len(self.pictures)}")
        return self

    @property
    def marks(self) -> int:
        """How often its words say `PICTURE`."""
        words = [self.text or "", *(message["content"] for message in self.messages or ())]
        return sum(text.count(PICTURE) for text in words)

    def as_text(self) -> str:
        """The prompt as plain text: what is said in a chat, with blank lines between."""
        return self.text if self.text is not None else "\n\n".join(map(said, self.messages or ()))

    def as_messages(self) -> list[dict[str, Any]]:
        """The prompt as a chat: a plain one is what a user says."""
        return self.messages or [{"role": "user", "content": self.as_text()}]


class Sampling(BaseModel):
    """How trajectories are drawn from the policy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    n: int = 1
    temperature: float = 1.0
    """0 means greedy. Log-probabilities are those of the tempered distribution; of the untruncated one, unless
    `candidates`."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    """Of the likeliest token's probability, below which a token is left out; 0 keeps all tokens."""
    candidates: bool = False
    """Which tokens these three kept is recorded, and log-probabilities are over those alone."""
    routing_replay: bool = False
    """Which experts a mixture sends each token to is recorded."""
    max_new_tokens: int = 16
    """0: as many as there is room for; whoever makes an engine's request says how many that is (`room`)."""
    stop: tuple[str, ...] = ()
    """Texts that end a trajectory once it contains one of them."""
    greedy_baseline: bool = False
    """One trajectory more, which is greedy: what the others are compared with, never trained on."""

    @property
    def trajectories(self) -> int:
        """Of a group, the greedy one included."""
        return self.n + self.greedy_baseline

    def one(self, greedy: bool, **more: Any) -> Sampling:
        """Of one trajectory; a ``greedy`` one is never trained on."""
        update = {"n": 1, "greedy_baseline": False, **more}
        return self.model_copy(update=update | ({"temperature": 0.0, "routing_replay": False} if greedy else {}))

    def room(self, size: int, longest: int | None) -> int:
        """Tokens that an answer to ``size`` of them may have, where both may have ``longest`` together (None: only the
        engine knows); less than 1: none."""
        left = self.max_new_tokens if longest is None else longest - size
        return min(self.max_new_tokens or left, left)

    @property
    def truncated(self) -> bool:
        """Some tokens are left out."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout of a prompt. All arrays are ``[tokens]``: the prompt's tokens, then the response's.

    ``loss_mask`` is 1 where the policy sampled; there ``logprobs`` holds the behaviour log-probability (natural
    logarithm) and ``versions`` the version that sampled the token. Elsewhere they are 0 and `UNSAMPLED`. Of one that
    was ``given`` it is 1 where its answer is learned, ``logprobs`` are 0, and ``versions`` are that of its rollout.
    """

    tokens: np.ndarray
    """int32"""
    loss_mask: np.ndarray
    """uint8"""
    logprobs: np.ndarray
    """float32"""
    versions: np.ndarray
    """int32"""
    text: str = ""
    """Everything after the prompt, decoded: the response, or all turns of an environment."""
    finish: Finish = "stop"
    candidate_counts: np.ndarray = field(default_factory=no_candidates)
    """int32: for each token how many tokens the sampler chose among, 0 for all of the vocabulary; or empty, where
    nothing was recorded."""
    candidate_ids: np.ndarray = field(default_factory=no_candidates)
    """int32 ``[sum of candidate_counts]``: those tokens, one position after the other."""
    rewards: np.ndarray = field(default_factory=no_rewards)
    """float32: what an environment gave, each reward on the last token of the turn that it is for; of a given answer
    that is preferred to a given one 1, and of that 0; or empty, where there is neither."""
    routing: np.ndarray = field(default_factory=no_routing)
    """uint8 or int16 ``[tokens, layers, experts of a token]``: where a mixture sent each token (see `routing`); or
    empty, where nothing was recorded."""
    turns: tuple[str, ...] = ()
    """What the policy said in each turn, decoded; empty where `text` is the only one."""
    failure: str = ""
    """What kept an environment from going on: this trajectory has no reward."""
    greedy: bool = False
    """Sampled greedily, as its group's baseline: never trained on."""
    given: bool = False
    """Not sampled: it is the row's own answer."""
    session: int = ALONE
    """The place in the group of the agent's session that it is a branch of; `ALONE` where there is no agent."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What its agent or its environment has measured, by name."""
    pictures: tuple[bytes, ...] = ()
    """What its tokens show where the policy did not sample them, in their order: `Prompt.pictures`, and those that an
    environment has answered with."""

    def __post_init__(self) -> None:
        for name, dtype in (
            ("tokens", "int32"),
            ("loss_mask", "uint8"),
            ("logprobs", "float32"),
            ("versions", "int32"),
        ):
            array = getattr(self, name)
            if array.dtype.name != dtype or array.shape != self.tokens.shape or array.ndim != 1:
                raise ExperienceError(f"{name}: expected {dtype} {self.tokens.shape}, got {array.dtype} {array.shape}")
        if self.tokens.size and self.tokens.min() < 0:
            raise ExperienceError("tokens: negative token id")
        if self.loss_mask.size and self.loss_mask.max() > 1:
            raise ExperienceError("loss_mask: values other than 0 and 1")
        sampled = self.loss_mask == 1
        if not np.all((self.versions >= 0) == sampled) or not np.all(self.versions >= UNSAMPLED):
            raise ExperienceError("versions: a token has a version exactly where the policy sampled it")
        if not np.all(np.isfinite(self.logprobs)) or np.any(self.logprobs > 1e-3) or np.any(self.logprobs[~sampled]):
            raise ExperienceError("logprobs: finite, not positive, and 0 where nothing was sampled")
        if self.rewards.dtype != np.float32 or self.rewards.shape not in ((0,), self.tokens.shape):
            raise ExperienceError("rewards: expected float32, one for each token, or none")
        if not np.all(np.isfinite(self.rewards)):
            raise ExperienceError("rewards: finite")
        if fault := routes.fault(self.routing, len(self.tokens)):
            raise ExperienceError(f"routing: {fault}")
        self._check_candidates(sampled)

    def _check_candidates(self, sampled: np.ndarray) -> None:
        counts, ids = self.candidate_counts, self.candidate_ids
        if counts.dtype != np.int32 or ids.dtype != np.int32 or counts.ndim != 1 or ids.ndim != 1:
            raise ExperienceError("candidate_counts, candidate_ids: expected int32 with one dimension")
        if counts.size and (counts.shape != self.tokens.shape or counts.min() < 0 or np.any(counts[~sampled])):
            raise ExperienceError("candidate_counts: one for each token, and 0 where nothing was sampled")
        if int(counts.sum(dtype=np.int64)) != ids.size:
            raise ExperienceError("candidate_ids: as many as candidate_counts say")
        if ids.size:
            owner = np.repeat(np.arange(len(counts)), counts)
            found = np.bincount(owner, weights=ids == self.tokens[owner], minlength=len(counts))
            if ids.min() < 0 or np.any(found != (counts > 0)):
                raise ExperienceError("candidate_ids: a sampled token is among those it was chosen from, once")

    @property
    def preference(self) -> float | None:
        """Of a given one that another of its row is preferred to 0, of that other one 1; None: of all others."""
        return float(self.rewards.sum()) if self.given and self.rewards.size else None

    @property
    def sampled(self) -> int:
        """Number of tokens that the policy sampled, or that it was given."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one prompt: the unit of lease, scoring and training."""

    number: int
    prompt: Prompt
    trajectories: Sequence[Trajectory] = field(default_factory=tuple)

    def check_ids(self, vocabulary: int) -> None:
        """Raises `ExperienceError` where a token is none of ``vocabulary``, a number of tokens."""
        for trajectory in self.trajectories:
            for ids in (trajectory.tokens, trajectory.candidate_ids):
                if ids.size and ids.max() >= vocabulary:
                    raise ExperienceError(f"tokens: {ids.max()} is beyond the model's vocabulary of {vocabulary}")

    @property
    def sampled(self) -> int:
        """Number of tokens that the policy sampled, or was given, over all trajectories."""
        return sum(trajectory.sampled for trajectory in self.trajectories)


def sessions_of(sessions: Sequence[int]) -> np.ndarray:
    """int64 ``[trajectories]``: which of a group's trajectories, whose ``sessions`` these are, are branches of the same
    agent's; from 0, in their order."""
    numbers: dict[tuple[int, int], int] = {}
    return np.array(
        [
            numbers.setdefault((session, number if session == ALONE else 0), len(numbers))
            for number, session in enumerate(sessions)
        ],
        np.int64,
    )


def mean_by_session(values: np.ndarray, sessions: np.ndarray) -> np.ndarray:
    """float64 ``[sessions]``: the mean over each one's branches that are not NaN; NaN where all are."""
    there = np.isfinite(values)
    size = int(sessions.max(initial=-1)) + 1
    counts = np.bincount(sessions[there], minlength=size)
    totals = np.bincount(sessions[there], values[there].astype(np.float64), minlength=size)
    return np.where(counts > 0, totals / np.maximum(counts, 1), np.nan)


def over_session(values: np.ndarray, sessions: np.ndarray) -> np.ndarray:
    """``[trajectories]``, as ``values`` are: the sum over all those with the same of ``sessions``, for each.

    >>> over_session(np.array([3, 2, 4, 0]), np.array([7, 7, 8, 9]))
    array([5, 5, 4, 0])
    """
    _, places = np.unique(sessions, return_inverse=True)
    found: np.ndarray = np.bincount(places, values)[places].astype(values.dtype)
    return found


Count = Annotated[int, Field(ge=-1, lt=1 << 53)]
"""What is added up, and kept."""


class GroupSummary(BaseModel):
    """What may be known of a group without decoding it. Whoever decodes it compares."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    trajectories: Count
    tokens: Count
    """Of all trajectories together, prompts included."""
    sampled: Count
    """Tokens that the policy sampled, or was given."""
    given: Count = 0
    """Of these, the ones that it was given."""
    oldest: Count
    """The lowest version among them; -1 where there are none."""
    newest: Count
    """The highest."""


def summarize(group: Group) -> GroupSummary:
    """The summary that travels with ``group``."""
    sampled = [t.versions[t.loss_mask == 1] for t in group.trajectories]
    versions = np.concatenate(sampled) if sampled else np.zeros(0, np.int32)
    return GroupSummary(
        trajectories=len(group.trajectories),
        tokens=sum(len(t.tokens) for t in group.trajectories),
        sampled=versions.size,
        given=sum(t.sampled for t in group.trajectories if t.given),
        oldest=int(versions.min(initial=np.iinfo(np.int32).max)) if versions.size else UNSAMPLED,
        newest=int(versions.max(initial=UNSAMPLED)),
    )
