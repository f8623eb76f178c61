"""Turns and what stands between them, joined to a trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.protocols.experience import UNSAMPLED, Finish, Trajectory, no_candidates, no_rewards


class Sampled(Protocol):
    """What a policy said: see `experience.Trajectory` for each of the arrays, all ``[tokens]``."""

    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def logprobs(self) -> np.ndarray: ...
    @property
    def versions(self) -> np.ndarray: ...
    @property
    def candidate_counts(self) -> np.ndarray: ...
    @property
    def candidate_ids(self) -> np.ndarray: ...


def join(
    parts: Sequence[np.ndarray | Sampled],
    text: str,
    finish: Finish,
    rewards: np.ndarray | None = None,
    turns: tuple[str, ...] = (),
    failure: str = "",
    greedy: bool = False,
) -> Trajectory:
    """A trajectory of ``parts``, one behind the other: int32 arrays of tokens that were not sampled, or not for it, and
    what the policy said."""
    candidates = any(not isinstance(part, np.ndarray) and part.candidate_counts.size for part in parts)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("tokens", "mask", "logprobs", "versions", "counts")}
    for part in parts:
        given = isinstance(part, np.ndarray)
        tokens = part if isinstance(part, np.ndarray) else part.tokens
        size = len(tokens)
        columns["tokens"].append(tokens)
        columns["mask"].append(np.full(size, not given, np.uint8))
        columns["logprobs"].append(np.zeros(size) if isinstance(part, np.ndarray) else np.minimum(part.logprobs, 0))
        columns["versions"].append(np.full(size, UNSAMPLED) if isinstance(part, np.ndarray) else part.versions)
        counted = not isinstance(part, np.ndarray) and part.candidate_counts.size
        columns["counts"].append(part.candidate_counts if counted else np.zeros(size))  # type: ignore[union-attr]
    ids = [part.candidate_ids for part in parts if not isinstance(part, np.ndarray)]
    return Trajectory(
        tokens=np.concatenate(columns["tokens"]).astype(np.int32),
        loss_mask=np.concatenate(columns["mask"]),
        logprobs=np.concatenate(columns["logprobs"]).astype(np.float32),
        versions=np.concatenate(columns["versions"]).astype(np.int32),
        text=text,
        finish=finish,
        candidate_counts=np.concatenate(columns["counts"]).astype(np.int32) if candidates else no_candidates(),
        candidate_ids=np.concatenate(ids).astype(np.int32) if candidates else no_candidates(),
        rewards=no_rewards() if rewards is None else rewards,
        turns=turns,
        failure=failure,
        greedy=greedy,
    )
