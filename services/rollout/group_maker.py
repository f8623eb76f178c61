"""How a lease becomes a finished group: the interface, and what its makers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.protocols.experience import UNSAMPLED, Group, Trajectory, no_candidates, no_rewards
from penstock.protocols.messages import Lease
from penstock.services.rollout.engines.base import Completion, Refusal

Made = tuple[Lease, Group | str]
"""A lease with its group, or with the reason why there is none."""


class GroupMaker(Protocol):
    """Called from the rollout's one thread."""

    def start(self, lease: Lease) -> None:
        """Begins a group. Whatever it raises is the prompt's fault, and costs this group alone."""

    def has(self, lease: Lease) -> bool:
        """The group is being made."""

    def take(self, result: Completion | Refusal) -> Made | None:
        """The engine is done with a request. Returns what that completes."""

    def heard(self, event: object) -> Made | None:
        """Something that this maker has posted to the inbox has arrived. Returns what that completes."""

    def gauges(self) -> dict[str, float]:
        """Numbers for the dashboard."""

    def close(self) -> None:
        """Releases what it holds."""


def handle_of(lease: Lease) -> int:
    """What the engine calls a group: a training group's own number; one of an evaluation must not be mistaken for
    it."""
    return lease.number if lease.purpose == "train" else -1 - lease.number


def stream_of(lease: Lease) -> int:
    """What a group's sampling is keyed by: its number, or, in an evaluation, its prompt's, so that each evaluation
    draws alike."""
    return lease.number if lease.purpose == "train" else -1 - lease.prompt.index


def join(
    parts: Sequence[np.ndarray | Completion],
    text: str,
    finish_of: Completion | None,
    rewards: np.ndarray | None = None,
    turns: tuple[str, ...] = (),
    failure: str = "",
    greedy: bool = False,
) -> Trajectory:
    """A trajectory of ``parts``, one behind the other: int32 arrays of tokens that were not sampled, and completions.
    It ends as ``finish_of`` did; None: it was cut off."""
    candidates = any(isinstance(part, Completion) and part.candidate_counts.size for part in parts)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("tokens", "mask", "logprobs", "versions", "counts")}
    for part in parts:
        sampled = isinstance(part, Completion)
        tokens = part.tokens if isinstance(part, Completion) else part
        size = len(tokens)
        columns["tokens"].append(tokens)
        columns["mask"].append(np.full(size, sampled, np.uint8))
        columns["logprobs"].append(np.minimum(part.logprobs, 0) if isinstance(part, Completion) else np.zeros(size))
        columns["versions"].append(part.versions if isinstance(part, Completion) else np.full(size, UNSAMPLED))
        counted = isinstance(part, Completion) and part.candidate_counts.size
        columns["counts"].append(part.candidate_counts if counted else np.zeros(size))  # type: ignore[union-attr]
    ids = [part.candidate_ids for part in parts if isinstance(part, Completion)]
    return Trajectory(
        tokens=np.concatenate(columns["tokens"]).astype(np.int32),
        loss_mask=np.concatenate(columns["mask"]),
        logprobs=np.concatenate(columns["logprobs"]).astype(np.float32),
        versions=np.concatenate(columns["versions"]).astype(np.int32),
        text=text,
        finish=finish_of.finish if finish_of else "length",
        candidate_counts=np.concatenate(columns["counts"]).astype(np.int32) if candidates else no_candidates(),
        candidate_ids=np.concatenate(ids).astype(np.int32) if candidates else no_candidates(),
        rewards=no_rewards() if rewards is None else rewards,
        turns=turns,
        failure=failure,
        greedy=greedy,
    )
