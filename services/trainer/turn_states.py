"""What a policy's turns were written after: the anchor states of GiGPO (Feng et al. 2025, arXiv:2505.10978, eq. 6)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from penstock.protocols.experience import Trajectory


def turn_states(trajectories: Sequence[Trajectory], sessions: np.ndarray) -> list[np.ndarray]:
    """int64 ``[tokens]`` of each trajectory: on each sampled token a fingerprint of what the policy had last been told
    before the turn that the token is part of (an environment's observation, or before the first the prompt), 0 on all
    others. Turns with the same fingerprint were written after the same words, whatever was said before these.
    ``sessions`` ``[trajectories]``: rows with the same number are branches of one session, each token of which is
    sampled in one of them alone."""
    branches = defaultdict(list)
    for trajectory, session in zip(trajectories, sessions.tolist(), strict=True):
        branches[session].append(trajectory)
    return [
        _states(trajectory, _said(trajectory, branches[session]))
        for trajectory, session in zip(trajectories, sessions.tolist(), strict=True)
    ]


def _said(trajectory: Trajectory, branches: list[Trajectory]) -> np.ndarray:
    """bool ``[tokens]``: what is the policy's own, also where another branch of the session is trained on it."""
    said = trajectory.loss_mask == 1
    for other in branches:
        if other is not trajectory:
            size = min(len(said), len(other.tokens))
            differs = np.flatnonzero(trajectory.tokens[:size] != other.tokens[:size])
            shared = int(differs[0]) if differs.size else size
            said[:shared] |= other.loss_mask[:shared] == 1
    return said


def _states(trajectory: Trajectory, said: np.ndarray) -> np.ndarray:
    found = np.zeros(len(said), np.int64)
    bounds = np.flatnonzero(np.diff(said, prepend=False, append=False))
    told = 0
    for start, end in zip(bounds[::2], bounds[1::2], strict=True):
        words = np.ascontiguousarray(trajectory.tokens[told:start], np.int32)
        found[start:end] = int.from_bytes(blake2b(words.tobytes(), digest_size=8).digest(), "little", signed=True)
        told = end
    return np.where(trajectory.loss_mask == 1, found, 0)
