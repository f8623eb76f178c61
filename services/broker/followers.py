"""A learner that follows the trainer, a critic, beside a ledger that is not the one it knew: of a store that is new, or
that has lost its last commits."""

from __future__ import annotations

from penstock.protocols import messages as m
from penstock.services.broker.state import BrokerState


def step_to_go_on_with(state: BrokerState, kind: str, step: int) -> m.Skip | None:
    """Where a ``kind`` that asks for ``step`` has to go back to: it has trained on steps that nobody knows of any more,
    or on other groups of one that waits for its columns. None: ``step`` is its next. Until the trainer has said what it
    remembers, nobody knows."""
    ledger = state.groups.ledger
    if step > ledger.length:
        return m.Skip(step=ledger.length) if state.groups.told else None
    before = ledger.taken(step - 1) if step - 1 >= ledger.first else None
    if before and before.digest is None and not _written(state, kind) <= set(before.columns):
        return m.Skip(step=step - 1)
    return None


def _written(state: BrokerState, kind: str) -> set[str]:
    return {column.name for column in state.settings.columns.columns if column.of_step and column.scorer == kind}
