"""Leases to rollouts or gateways, finished groups from them."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, PlainSerializer

from penstock.protocols import wire
from penstock.protocols.experience import Bytes, GroupSummary, Prompt, Purpose, Sampling, as_bytes
from penstock.protocols.messages.base import Message


def _packed(records: dict[str, np.ndarray]) -> np.ndarray:
    return as_bytes(wire.pack({name: data.tobytes() for name, data in records.items()}))


def _unpacked(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    found = wire.unpack(value.data)
    if not isinstance(found, dict) or not all(isinstance(data, bytes) for data in found.values()):
        raise ValueError("what was packed is no map of bytes")
    return {name: as_bytes(data) for name, data in found.items()}


Records = Annotated[dict[str, Bytes], BeforeValidator(_unpacked), PlainSerializer(_packed)]
"""Payloads by name. They travel as one, since there may be more of them than a message may have frames."""


class Lease(Message):
    """broker → rollout or gateway: generate group ``number``. The same number with a higher attempt is the same group
    again."""

    purpose: Purpose
    number: int
    attempt: int
    seed: int
    prompt: Prompt
    sampling: Sampling
    version: int = -1
    """What its holder serves, as far as the broker knows: answers that are given count to it."""
    source: str = ""
    """What the prompt counts to: its own source, or else the evaluation set that it is from."""
    records: Records = {}
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
