"""Work for scorers, and what they say of it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from penstock.protocols.experience import Bytes, Floats
from penstock.protocols.messages.base import Message


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
    """reward → broker. Answered by `Ack`."""

    scores: list[Score]


class ReferenceScore(BaseModel):
    """Reference log-probabilities of one group, float32 ``[tokens of all]``, 0 where nothing was sampled."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    number: int
    logprobs: Floats


class Referenced(Message):
    """reference → broker. Answered by `Ack`."""

    scores: list[ReferenceScore]
