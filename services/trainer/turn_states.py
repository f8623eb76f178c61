"""What a policy's turns were written after: the anchor states of GiGPO (Feng et al. 2025, arXiv:2505.10978, eq. 6)."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from penstock.protocols.experience import Trajectory


def turn_states(trajectory: Trajectory) -> np.ndarray:
    """int64 ``[tokens]``: on each sampled token a fingerprint of what the policy had last been told before the turn
    that the token is part of (an environment's observation, or before the first the prompt), 0 on all others. Turns
    with the same fingerprint were written after the same words, whatever was said before these."""
    sampled = trajectory.loss_mask.astype(bool)
    found = np.zeros(len(sampled), np.int64)
    bounds = np.flatnonzero(np.diff(sampled, prepend=False, append=False))
    told = 0
    for start, end in zip(bounds[::2], bounds[1::2], strict=True):
        words = np.ascontiguousarray(trajectory.tokens[told:start], np.int32)
        found[start:end] = int.from_bytes(blake2b(words.tobytes(), digest_size=8).digest(), "little", signed=True)
        told = end
    return found
