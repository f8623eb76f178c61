"""Giving out work: leases to rollouts, finished groups to scorers, batches to the trainer."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any

import structlog

from penstock.protocols import messages as m
from penstock.protocols import wire
from penstock.protocols.experience import Prompt, as_bytes
from penstock.services.broker.membership import Member
from penstock.services.broker.rules.ledger import LedgerError
from penstock.services.broker.rules.replay import Entry, Scorer
from penstock.services.broker.state import BrokerState
from penstock.services.broker.status import stall_reason
from penstock.services.data import DataError

log = structlog.get_logger()

SUSPECT_AFTER = 2
"""A group that was leased this often without an answer is given to a rollout that holds nothing else."""
NOT_READY_AFTER_S = 15.0
"""A take that cannot be served for this long is answered with the reason."""


@dataclass(slots=True)
class Waiting:
    """A trainer that has asked for a step."""

    identity: str
    request: int
    step: int
    since: float


class Scheduler:
    """Everything goes by credit: nobody is given more than it has asked for."""

    def __init__(self, desk: BrokerState) -> None:
        self._desk = desk
        self.waiting: Waiting | None = None
        """The trainer's take that is not served yet."""

    def grant(self, now: float) -> None:
        """Gives evaluation prompts, then training groups, to the rollouts with the most room."""
        desk = self._desk
        leases = desk.experience.leases.open
        alone = {x.holder for x in leases.values() if x.attempt > SUSPECT_AFTER}
        rollouts_here = desk.members.of_kind("rollout")
        current = [r for r in rollouts_here if desk.serves_current(r) and r.identity not in alone]
        while desk.experience.consecutive_drops < desk.settings.broker.max_consecutive_drops:
            rollouts = [r for r in current if r.room > 0]
            if not rollouts:
                return
            rollout = max(rollouts, key=lambda r: (r.room, r.name))
            held_out = desk.evaluation.waiting()
            if held_out:
                exact = desk.evaluation.round.exact if desk.evaluation.round else None
                fit = [r for r in rollouts if exact in (None, r.version)]
                if not fit:
                    return
                rollout = max(fit, key=lambda r: r.room)
                sampling = desk.settings.eval_sampling
                try:
                    prompt = _sendable(desk.held_out[held_out.index])
                except (DataError, wire.WireError) as error:
                    log.warning("evaluation prompt cannot be used", row=held_out.index, error=str(error))
                    desk.score_evaluation(held_out.number, 0.0)
                    continue
                desk.evaluation.hold(held_out, rollout.identity, now + desk.settings.broker.lease_s)
                self._lease(
                    rollout, m.Lease(number=held_out.number, attempt=1, seed=0, prompt=prompt, sampling=sampling)
                )
                continue
            if desk.progress.phase != "training":
                return
            lease = desk.experience.next_lease(rollout.version)
            if lease is None:
                ahead = max(rollouts, key=lambda r: (r.version, r.room))
                lease = desk.experience.next_lease(ahead.version) if ahead is not rollout else None
                if lease is None:
                    return
                rollout = ahead
            if lease.attempt >= desk.settings.broker.max_attempts:
                desk.experience.drop(lease.number, f"leased {lease.attempt} times without an answer")
                continue
            if lease.attempt >= SUSPECT_AFTER:  # it may be what kills its rollouts: now it takes nobody with it
                holders = {x.holder for x in leases.values()}
                needed = desk.experience.gate.required_version(lease.number)
                idle = [r for r in rollouts if r.identity not in holders and r.version >= needed]
                if not idle:
                    return
                rollout = idle[0]
                current.remove(rollout)
            try:
                prompt = _sendable(desk.prompts.draw(lease.draw))
                message = m.Lease(
                    number=lease.number,
                    attempt=lease.attempt + 1,
                    seed=desk.settings.seed,
                    prompt=prompt,
                    sampling=desk.settings.sampling,
                )
            except (DataError, wire.WireError) as error:
                desk.experience.drop(lease.number, f"its prompt cannot be used: {error}")
                continue
            if lease.attempt == 0:
                desk.progress.totals["leased"] += 1
            desk.experience.leases.grant(lease, rollout.identity, now + desk.settings.broker.lease_s)
            self._lease(rollout, message)

    def _lease(self, rollout: Member, lease: m.Lease) -> None:
        rollout.given += 1
        self._desk.exchange.send(rollout.identity, lease)

    def offer(self, scorer: Scorer) -> None:
        """Gives finished groups to the scorers of a kind, in number order, as far as their credit reaches."""
        desk = self._desk
        scorers = [s for s in desk.members.of_kind(scorer) if s.room > 0]
        if not scorers:
            return
        work: dict[str, list[m.WorkItem]] = {}
        deadline = time.time() + desk.settings.broker.lease_s
        pending: list[Entry | Any] = list(desk.evaluation.unscored()) if scorer == "reward" else []
        for item in [*pending, *desk.experience.replay.unoffered(scorer)]:
            worker = max(scorers, key=lambda s: s.room)
            if worker.room <= 0:
                break
            if isinstance(item, Entry):
                if item.attempts.get(scorer, 0) >= desk.settings.broker.max_attempts:
                    desk.drop(item.number, f"{scorer} was offered it {item.attempts[scorer]} times without an answer")
                    continue
                desk.experience.replay.offer(item, scorer, worker.identity, deadline)
                experience = desk.payload(item.number)
            else:
                desk.evaluation.hold(item, worker.identity, deadline)
                assert item.experience is not None
                experience = item.experience
            worker.given += 1
            work.setdefault(worker.identity, []).append(m.WorkItem(number=item.number, experience=as_bytes(experience)))
        for identity, items in work.items():
            desk.exchange.send(identity, m.Work(items=items))

    def serve_take(self, now: float) -> None:
        """Answers the trainer's take once there is a batch, once there never will be one, or with what holds it up."""
        desk, waiting = self._desk, self.waiting
        if waiting is None or desk.members.get(waiting.identity) is None:
            self.waiting = None
            return
        if desk.progress.phase in ("training", "evaluating_after"):
            try:
                step = desk.experience.take(waiting.step, self._step_seed(waiting.step))
            except LedgerError as error:
                self.waiting = None
                desk.exchange.send(waiting.identity, m.Refused(code="bad_message", reason=str(error)), waiting.request)
                return
            if step:
                self.waiting = None
                desk.exchange.send(waiting.identity, desk.batch(step), waiting.request)
                return
            if desk.experience.ended(waiting.step):
                self.waiting = None
                reason = "the run's last step is done" if waiting.step >= desk.settings.steps else "the prompts ended"
                desk.exchange.send(waiting.identity, m.Exhausted(steps=waiting.step, reason=reason), waiting.request)
                return
        if now - waiting.since > NOT_READY_AFTER_S:
            self.waiting = None
            reason = f"step {waiting.step} waits: {stall_reason(desk)}"
            log.warning("stall", step=waiting.step, reason=reason)
            desk.exchange.send(waiting.identity, m.Refused(code="not_ready", reason=reason), waiting.request)

    def _step_seed(self, step: int) -> int:
        digest = hashlib.sha256(f"{self._desk.settings.seed}/{step}".encode()).digest()
        return int.from_bytes(digest[:4], "little")


def _sendable(prompt: Prompt) -> Prompt:
    """``prompt``, once it is known to survive the wire. Raises `WireError` where its truth holds what cannot."""
    wire.unpack(wire.pack(prompt.model_dump()))
    return prompt
