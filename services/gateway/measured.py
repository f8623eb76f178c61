"""What agents say of their own sessions: rewards, and what else they have measured, of which a step's metrics have the
mean as ``agent/NAME``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog

from penstock.protocols.experience import MOST_REWARD
from penstock.protocols.measured import fault
from penstock.services.gateway.errors import AgentError
from penstock.services.gateway.turn_names import turn_called
from penstock.services.gateway.work import Held

log = structlog.get_logger()

_unread: set[str] = set()
"""Sources of which it was told already."""


def checked_reward(reward: float | None, needed: bool) -> float:
    """As it is kept; 0 where the reward functions say it, unless it is ``needed``. Raises `AgentError`."""
    if reward is None and needed:
        raise AgentError(422, "no_reward", "reward: this task has no other reward than what agents say; give one")
    if reward is not None and not abs(reward) <= MOST_REWARD:
        why = f"{reward} is no number between {-MOST_REWARD:g} and {MOST_REWARD:g}"
        raise AgentError(422, "invalid_request", f"reward: {why}")
    return reward or 0.0


def turn_rewards(held: Held, said: Mapping[Any, float], read: bool, beside: float = 0.0) -> dict[int, float]:
    """Of a session's turns by number, once more was ``said``, by turns' names; ``read``: the session's reward is made
    of what agents say, of which ``beside`` is the rest. Raises `AgentError`."""
    if said and not read:
        of = f" for the source {held.work.lease.source!r}" if held.work.lease.source else ""
        raise AgentError(
            422, "not_read",
            f"a turn's reward: this run's reward.functions have no `environment`{of}, which stands for what agents "
            "say: add it to them, or leave rewards of turns out",
        )  # fmt: skip
    found = {turn.number: turn.reward for turn in held.session.turns.values() if turn.reward is not None}
    for name, reward in said.items():
        found[turn_called(name, held.id, held.session).number] = checked_reward(reward, needed=True)
    if not (total := sum(map(abs, [beside, *found.values()]))) <= MOST_REWARD:  # nor may sums of some of them
        why = f"the session's add up to {total:g}, more than {MOST_REWARD:g}"
        raise AgentError(422, "invalid_request", f"reward: {why}")
    return found


def said_at_the_end(
    held: Held, reward: float | None, metrics: Mapping[str, float], rewards: Mapping[str, float], read: bool
) -> dict[str, Any]:
    """How a session ends, as it is kept; ``rewards`` and ``read`` as for `turn_rewards`. Raises `AgentError`."""
    if reward and not read:
        _note_unread(held.work.lease.source)
    of_some = bool(rewards) or any(turn.reward is not None for turn in held.session.turns.values())
    own = checked_reward(reward, needed=read and not of_some)
    of_turns = {str(number): value for number, value in turn_rewards(held, rewards, read, own).items()}
    return {"reward": own, "metrics": checked(metrics), "turn_rewards": of_turns}


def _note_unread(source: str) -> None:
    """Once of each source: agents that play for runs of several kinds say it in all."""
    if source not in _unread:
        _unread.add(source)
        log.warning(
            "an agent's reward is not read: reward.functions have no `environment`, which stands for it",
            **({"source": source} if source else {}),
        )


def checked(metrics: Mapping[str, float]) -> dict[str, float]:
    """As they are kept. Raises `AgentError`."""
    if wrong := fault(metrics):
        raise AgentError(422, "invalid_request", f"metrics: {wrong}")
    return {name: float(value) for name, value in metrics.items()}
