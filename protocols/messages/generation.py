"""Leases to rollouts or gateways, finished groups from them."""

from __future__ import annotations

from penstock.protocols.experience import Bytes, GroupSummary, Prompt, Purpose, Sampling
from penstock.protocols.messages.base import Message


class Lease(Message):
    """broker → rollout or gateway: generate group ``number``. The same number with a higher attempt is the same group
    again."""

    purpose: Purpose
    number: int
    attempt: int
    seed: int
    prompt: Prompt
    sampling: Sampling
    records: dict[str, Bytes] = {}
    """What gateways have had kept of it: `agents.Note`, and of each turn its note and its answer."""


class Finished(Message):
    """rollout → broker: a finished group (`packed_groups.pack_group`). Answered by `Ack` once it is durable."""

    purpose: Purpose
    number: int
    attempt: int
    summary: GroupSummary
    experience: Bytes


class Failed(Message):
    """rollout → broker: this prompt cannot be generated from, for a reason that trying again will not mend."""

    purpose: Purpose
    number: int
    attempt: int
    error: str
