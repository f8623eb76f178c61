"""The last check of a version: what the engine makes of it, on one short sequence."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.protocols.messages import Canary
from penstock.protocols.versions import DigestError
from penstock.services.weights.receiver.loader import WeightLoader


class CanaryError(DigestError):
    """The bytes are right, and what the engine makes of them is not."""


def check_canary(engine: WeightLoader, prepared: Any, canary: Canary) -> float:
    """The mean difference of its log-probabilities, the largest of its replicas'. Raises `CanaryError` where that is
    too large."""
    found = np.atleast_2d(engine.score(prepared, np.array(canary.tokens, np.int32)))
    wanted = np.array(canary.logprobs, np.float32)
    difference = float(np.abs(found - wanted).mean(-1).max()) if found.shape[1:] == wanted.shape else float("nan")
    if not difference <= canary.tolerance:
        raise CanaryError(
            f"the canary's log-probabilities differ by {difference:.3g} on average from the trainer's; "
            f"{canary.tolerance:g} is allowed (weights.canary_tolerance)"
        )
    return difference
