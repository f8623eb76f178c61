"""The loss on held-out rows: the trainer is given the rows, measures it, and says what it has found."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import structlog

from penstock.protocols import messages as m
from penstock.services.broker import best_version
from penstock.services.broker.membership import Member
from penstock.services.data import DataError

if TYPE_CHECKING:
    from penstock.services.broker.state import BrokerState

log = structlog.get_logger()

AT_ONCE = 16
"""Rows of a message: they may show pictures."""


def send_rows(state: BrokerState, member: Member, request: int, asked: m.HeldOutRequest) -> None:
    """Some rows, from one on."""
    held_out, rows = state.held_out_given, []
    end = min(len(held_out), asked.begin + AT_ONCE)
    for draw in range(max(0, asked.begin), end):
        name = held_out.name_of(draw)
        try:
            rows.append(m.HeldOutRow(set=name, prompt=held_out.draw(draw)))
        except DataError as error:
            log.warning("a held-out row cannot be used", set=name, error=str(error))
    state.router.send(member.identity, m.HeldOutRows(rows=rows, next=end, more=end < len(held_out)), request)


def take(state: BrokerState, member: Member, request: int, said: m.EvalLoss) -> None:
    """Writes it down; said again, it changes nothing."""
    if state.losses.by_step.get(said.step) != said.sets:
        state.losses.note(said.step, said.sets)
        log.info("measured on held-out rows", step=said.step, **said.sets)
        state.recorder.losses({"step": said.step, "sets": said.sets, "time": time.time()})
        if state.progress.phase == "training":
            best_version.consider_end(state)
    state.router.send(member.identity, m.Ack(), request)
