"""What agents say of their own sessions at the end: the reward, and what else they have measured, of which a step's
metrics have the mean as ``agent/NAME``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from penstock.protocols.experience import FLOAT32_MAX
from penstock.services.gateway.errors import AgentError

MOST = 32
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def checked_reward(reward: float | None, needed: bool) -> float:
    """As it is kept; 0 where the reward functions say it, unless it is ``needed``. Raises `AgentError`."""
    if reward is None and needed:
        raise AgentError(422, "no_reward", "reward: this run has no other reward than what agents say; give one")
    if reward is not None and not abs(reward) <= FLOAT32_MAX:
        raise AgentError(422, "invalid_request", f"reward: {reward} is no finite number")
    return reward or 0.0


def checked(metrics: Mapping[str, float]) -> dict[str, float]:
    """As they are kept. Raises `AgentError`."""
    if len(metrics) > MOST:
        raise AgentError(422, "invalid_request", f"metrics: {len(metrics)} of them; a session has at most {MOST}")
    for name, value in metrics.items():
        if not NAME.fullmatch(name):
            raise AgentError(422, "invalid_request", f"metrics: {name[:80]!r}: a name is like {NAME.pattern}")
        if not math.isfinite(value):
            raise AgentError(422, "invalid_request", f"metrics: {name}: {value} is no finite number")
    return {name: float(value) for name, value in metrics.items()}
