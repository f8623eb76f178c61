"""The loss on held-out rows: the trainer is given the rows, measures it, and says what it has found."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import structlog

from penstock.protocols import messages as m
from penstock.protocols import wire
from penstock.services.broker import best_version
from penstock.services.broker.membership import Member
from penstock.services.data import DataError

if TYPE_CHECKING:
    from penstock.services.broker.state import BrokerState

log = structlog.get_logger()

AT_ONCE, BYTES_AT_ONCE = 64, 4 << 20
"""Rows of a message, which may show pictures, and their bytes, but for the last one's."""


def send_rows(state: BrokerState, member: Member, request: int, asked: m.HeldOutRequest) -> None:
    """Some rows, from one on."""
    held_out, rows, size, end = state.held_out_given, list[m.HeldOutRow](), 0, max(0, asked.begin)
    while end < len(held_out) and len(rows) < AT_ONCE and size < BYTES_AT_ONCE:
        name, draw, end = held_out.name_of(end), end, end + 1
        try:
            row = m.HeldOutRow(set=name, prompt=held_out.draw(draw))
            wire.check(said := row.model_dump())
        except (DataError, wire.WireError) as error:
            log.warning("a held-out row cannot be used", set=name, error=str(error))
            continue
        rows.append(row)
        size += len(wire.pack(said))
    state.router.send(member.identity, m.HeldOutRows(rows=rows, next=end, more=end < len(held_out)), request)


def take(state: BrokerState, member: Member, request: int, said: m.EvalLoss) -> None:
    """Writes it down; said again, it changes nothing."""
    if state.losses.by_step.get(said.step) != said.sets:
        state.losses.note(said.step, said.sets, said.pairs)
        log.info("measured on held-out rows", step=said.step, sets=said.sets, pairs=said.pairs)
        pairs = {"pairs": said.pairs} if said.pairs else {}
        state.recorder.losses({"step": said.step, "sets": said.sets, **pairs, "time": time.time()})
        if said.step < state.settings.steps:  # whatever the phase: a broker that has just begun hears it, too
            best_version.consider_end(state)
    state.router.send(member.identity, m.Ack(), request)
