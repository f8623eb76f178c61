"""A baseline that follows the rewards of each role over the steps: Liu et al. 2025, arXiv:2506.24119 (SPIRAL)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.protocols.columns import AGENT, BASELINE
from penstock.services.learning.batch import TrainingBatch

KEPT = f"{BASELINE}/"
"""What names in a learner's `state` begin with."""


def running_baselines(
    rewards: Sequence[float], roles: Sequence[str], sessions: Sequence[int], decay: float, state: dict[str, float]
) -> np.ndarray:
    """float64 ``[rows]``: b of each row's role, once it has followed the row's own reward R by b ← decay · b +
    (1 − decay) · R, one row after the other in the step's order; it begins at 0. Rows with the same role that are
    branches of one session are followed once, by their mean. ``state`` has b by role, and keeps it."""
    branches: dict[tuple[str, int], list[float]] = {}
    for reward, role, session in zip(rewards, roles, sessions, strict=True):
        branches.setdefault((role, session), []).append(float(reward))
    found, followed = np.zeros(len(rewards)), set()
    for row, (role, session) in enumerate(zip(roles, sessions, strict=True)):
        name, own = KEPT + role, branches[role, session]
        if (role, session) not in followed:
            state[name] = decay * state.get(name, 0.0) + (1 - decay) * sum(own) / len(own)
        followed.add((role, session))
        found[row] = state[name]
    return found


def roles_of(step: TrainingBatch, rows: np.ndarray, column: str | None) -> list[str]:
    """Of each of ``rows``: its prompt's source, and the number that ``column`` (or a metric of agents) has for it, as
    ``SOURCE/NUMBER``, either where there is one; ``all`` where there is neither."""
    sources: Sequence[str] = step.sources or [""] * len(step.trajectories)
    named = {row: _number(step, row, column) for row in rows.tolist()} if column else {}
    return ["/".join(filter(None, (sources[row], named.get(row, "")))) or "all" for row in rows.tolist()]


def _number(step: TrainingBatch, row: int, column: str) -> str:
    """Of a metric it may be empty: not everybody tells it."""
    if not column.startswith(AGENT):
        return f"{step.values[column][row]:g}"
    told = step.trajectories[row].metrics.get(column.removeprefix(AGENT))
    return "" if told is None else f"{told:g}"
