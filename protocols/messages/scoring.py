"""Work for scorers, and what they say of it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from penstock.protocols.experience import Bytes, Purpose, Values
from penstock.protocols.messages.base import Message


class WorkItem(BaseModel):
    """One finished group to score."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    purpose: Purpose
    number: int
    experience: Bytes
    """`packed_groups.pack_group`"""
    trajectories: int
    tokens: int
    """Of all trajectories together; like the two beside it as the rollout said, to be compared."""
    oldest: int
    """The lowest version among the sampled ones."""
    wanted: list[str]
    """The columns to answer with."""
    columns: dict[str, Values] = {}
    """The columns that the wanted ones read."""
    step: int = 0
    """Steps committed so far."""


class Work(Message):
    """broker → scorer: score these."""

    items: list[WorkItem]


class Score(BaseModel):
    """One column of one group."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    purpose: Purpose
    number: int
    values: Values
    """``[trajectories]``, ``[tokens of all trajectories]``, or of those that were sampled as many values as the column
    has of each; of the column's dtype; empty with ``unusable``."""
    errors: list[str] = []
    """Why trajectories have no value (NaN)."""
    unusable: str = ""
    """Why nobody can score this group: it is dropped."""
    seconds: float = 0.0
    """From when the scorer had the work to its answer."""


class Scores(Message):
    """scorer → broker: one column, for some groups. Answered by `Ack` once it is durable."""

    column: str
    scores: list[Score]
