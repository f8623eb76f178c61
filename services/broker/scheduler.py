"""Giving out work: leases to rollouts, finished groups to scorers, batches to the trainer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import structlog

from penstock.protocols import messages as m
from penstock.protocols import wire
from penstock.protocols.columns import Column
from penstock.protocols.experience import Prompt, Purpose
from penstock.services.broker import clock
from penstock.services.broker.batches import batch_for
from penstock.services.broker.followers import step_to_go_on_with
from penstock.services.broker.granting import Room, Suspects, alone, grant_groups
from penstock.services.broker.membership import Member
from penstock.services.broker.payloads import PayloadLostError
from penstock.services.broker.rules.leases import Lease
from penstock.services.broker.rules.ledger import LedgerError
from penstock.services.broker.rules.replay_buffer import Entry, attempts_of
from penstock.services.broker.scoring import replay_of, unjudged
from penstock.services.broker.state import BrokerState
from penstock.services.broker.status import stall_reason
from penstock.services.data import DataError

log = structlog.get_logger()

NOT_READY_AFTER_S = 15.0
"""A take that cannot be served for this long is answered with the reason."""
WORK_ITEMS = 256
"""Groups in one message to a scorer: what is small of each is in one frame, which has a limit."""


@dataclass(slots=True)
class Waiting:
    """A learner that has asked for a step."""

    identity: str
    request: int
    step: int
    since: float


class Scheduler:
    """Everything goes by credit: nobody is given more than it has asked for."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self.waiting: dict[str, Waiting] = {}
        """By kind of learner: the take that is not served yet."""

    # --- leases ------------------------------------------------------------------------------------------------------

    def grant(self, now: float) -> None:
        """Gives evaluation prompts, then training groups, to the rollouts with the most room."""
        state = self._state
        rollouts = [r for r in state.members.of_kind("rollout") if r.room > 0 and state.serves_current(r)]
        if not rollouts:
            return
        books = state.groups.leases, state.evaluation.leases
        suspected = set().union(*(alone(book.holds, book.open) for book in books))
        rollouts = [r for r in rollouts if r.identity not in suspected]
        busy, most = [book.holds.holders() for book in books], state.settings.broker.max_attempts
        self.grant_evaluation(rollouts, now, Suspects(rollouts, busy, most))
        if state.progress.phase == "training" and not self.evaluation_waits_for_room():
            grant_groups(
                state.groups, rollouts, self.next_group, lambda lease, to: self.lease("train", lease, to, now),
                Suspects(rollouts, busy, most),
            )  # fmt: skip

    def evaluation_waits_for_room(self) -> bool:
        """Evaluation prompts go first, but for those that wait until a version is served, or for a rollout that holds
        nothing."""
        sound = not self._state.settings.agents
        return self._state.evaluation.leases.waiting(sound) is not None and self.evaluation_served()

    def evaluation_served(self) -> bool:
        """There is a round, and a rollout that serves a version which may answer it."""
        round = self._state.evaluation.round
        return round is not None and any(r.version >= round.least for r in self._state.members.of_kind("rollout"))

    def grant_evaluation(self, members: list[Member], now: float, suspects: Suspects | None = None) -> None:
        """Evaluation prompts to those of ``members`` that have room and serve the round's version; where there are no
        ``suspects`` among them, whatever they serve."""
        state, room = self._state, Room(members)
        while state.evaluation.round and (room or (suspects and suspects.open)):
            lease = state.evaluation.leases.waiting(bool(suspects and suspects.waits))
            if lease is None:
                return
            if lease.attempt >= state.settings.broker.max_attempts:
                state.drop_evaluation(lease.number, f"leased {lease.attempt} times without an answer")
                continue
            round = state.evaluation.round
            if suspects and lease.suspect:
                if chosen := suspects.take(lease.attempt, round.least, round.exact is not None):
                    self.lease("eval", lease, chosen, now)
                room = Room(members)
                continue
            rollout = room.take(round.least if suspects else None, round.exact is not None)
            if rollout is None:
                return
            self.lease("eval", lease, rollout, now)
            room.put_back(rollout)

    def next_group(self, newest: int, sound: bool = False) -> Lease | None:
        """The group that may be leased now, where ``newest`` is the newest version served; ``sound``: no suspect. One
        that was leased too often without an answer is dropped; too many drops in a row, and there is none."""
        state, groups = self._state, self._state.groups
        while groups.consecutive_drops < state.settings.broker.max_consecutive_drops:
            lease = groups.next_lease(newest, sound)
            if lease is None or lease.attempt < state.settings.broker.max_attempts:
                return lease
            state.drop(lease.number, f"leased {lease.attempt} times without an answer", "unanswered")
        return None

    def lease(self, purpose: Purpose, lease: Lease, rollout: Member, now: float) -> None:
        """Gives it to ``rollout``; a prompt that cannot be used, or sessions that cannot be sent, cost their group
        alone."""
        state = self._state
        try:
            drawn = state.prompts.draw(lease.draw) if purpose == "train" else state.held_out.draw(lease.draw)
            source = drawn.source or (state.held_out.name_of(lease.draw) if purpose == "eval" else "")
            if not state.settings.columns.judged(source, purpose == "eval"):
                raise DataError(unjudged(source))
            prompt = _sendable(drawn if drawn.source == source else drawn.model_copy(update={"source": source}))
        except (DataError, wire.WireError) as error:
            reason = f"its prompt cannot be used: {error}"
            state.drop_any(purpose, lease.number, reason, "prompt")
            return
        message = m.Lease(
            purpose=purpose,
            number=lease.number,
            attempt=lease.attempt + 1,
            seed=state.settings.seed if purpose == "train" else 0,
            prompt=prompt,
            sampling=state.sampling(purpose, lease.draw),
            version=rollout.version,
            source=source,
            records=state.kept_of(purpose, lease),
        )
        try:
            state.router.send(rollout.identity, message)
        except wire.WireError as error:
            state.drop_any(purpose, lease.number, f"its lease cannot be sent: {error}", "unusable")
            return
        book = state.groups.leases if purpose == "train" else state.evaluation.leases
        if purpose == "train" and not lease.granted:
            state.progress.totals["leased"] += 1
        book.grant(lease, rollout.identity, now + state.settings.broker.lease_s)
        rollout.given += 1
        if purpose == "train":
            state.traces.leased(lease.number, rollout.name)

    # --- offers ------------------------------------------------------------------------------------------------------

    def offer(self, scorer: str) -> None:
        """Gives finished groups to the scorers of a kind, in number order, as far as their credit reaches."""
        state = self._state
        purposes: tuple[Purpose, Purpose] = "eval", "train"
        members = [member for member in state.members.of_kind(scorer) if member.room > 0]
        if not members:
            return
        replays = [replay_of(state, purpose) for purpose in purposes]
        suspected = set().union(*(replay.alone(scorer) for replay in replays))
        members = [member for member in members if member.identity not in suspected]
        busy = [replay.holds.holders() for replay in replays]
        suspects = Suspects(members, busy, state.settings.broker.max_attempts)
        work: dict[str, list[m.WorkItem]] = {}
        for purpose, replay in zip(purposes, replays, strict=True):
            for entry, columns in replay.suspects(scorer):
                if not self._dropped(scorer, purpose, entry, columns):
                    member = suspects.take(attempts_of(entry, columns))
                    if member is None:
                        break
                    self._hand_out(purpose, entry, columns, member, work)
        room = Room(members)
        for purpose, replay in zip(purposes, replays, strict=True):
            for entry, columns in replay.unoffered(scorer):
                if not self._dropped(scorer, purpose, entry, columns):
                    member = room.take_besides({entry.refused.get(column.name) for column in columns})
                    if member is None:
                        break
                    self._hand_out(purpose, entry, columns, member, work)
                    room.put_back(member)
        for identity, items in work.items():
            for begin in range(0, len(items), WORK_ITEMS):
                state.router.send(identity, m.Work(items=items[begin : begin + WORK_ITEMS]))

    def _dropped(self, scorer: str, purpose: Purpose, entry: Entry, columns: list[Column]) -> bool:
        attempts = attempts_of(entry, columns)
        if attempts < self._state.settings.broker.max_attempts:
            return False
        reason = f"{scorer} was offered it {attempts} times without an answer"
        self._state.drop_any(purpose, entry.number, reason, "unanswered")
        return True

    def _hand_out(
        self, purpose: Purpose, entry: Entry, columns: list[Column], member: Member, work: dict[str, list[m.WorkItem]]
    ) -> None:
        deadline = clock.now() + self._state.settings.broker.lease_s
        replay_of(self._state, purpose).offer(entry, columns, member.identity, deadline)
        member.given += 1
        work.setdefault(member.identity, []).append(self._work_item(purpose, entry, columns))

    def _work_item(self, purpose: Purpose, entry: Entry, columns: list[Column]) -> m.WorkItem:
        state, key = self._state, (purpose, entry.number)
        reads = sorted({name for column in columns for name in column.reads})
        if state.settings.columns.by_source:  # who reads a sum reads its terms, of which this source is asked for some
            table = state.settings.columns.by_name
            reads = [name for name in reads if name not in table or table[name].asked(entry.source)]
        return m.WorkItem(
            purpose=purpose,
            number=entry.number,
            experience=state.payloads.experience(key),
            trajectories=entry.trajectories,
            tokens=entry.tokens,
            oldest=entry.oldest,
            wanted=[column.name for column in columns],
            columns=state.payloads.columns(key, reads),
            step=state.groups.ledger.committed,
        )

    # --- batches -----------------------------------------------------------------------------------------------------

    def serve_take(self, now: float) -> None:
        """Answers learners' takes once there is a batch, once there never will be one, or with what holds it up."""
        state = self._state
        for kind, waiting in list(self.waiting.items()):
            here = state.members.get(waiting.identity) is not None
            reply = self._answer_take(kind, waiting, now) if here else None
            if reply or not here:
                del self.waiting[kind]
            if reply:
                self._send(kind, waiting, reply)

    def _send(self, kind: str, waiting: Waiting, reply: m.Message) -> None:
        state = self._state
        try:
            state.router.send(waiting.identity, reply, waiting.request)
        except wire.WireError as error:
            state.progress.error = (
                f"the batch of step {waiting.step} cannot be sent to the {kind}: {error}; take fewer groups a step "
                "(gate.groups_per_step) or smaller ones (rollout.sampling.n)"
            )
            log.error("a batch cannot be sent", error=state.progress.error)
            state.progress.stop(state.progress.error)

    def _answer_take(self, kind: str, waiting: Waiting, now: float) -> m.Message | None:
        state, ledger = self._state, self._state.groups.ledger
        follows = kind != "trainer"
        if follows and (skip := step_to_go_on_with(state, kind, waiting.step)):
            return skip
        # Who only follows the trainer may be ahead of it, and waits.
        open_to_all = ledger.may_take and state.groups.told  # or it is one that the store has lost, and the trainer not
        early = follows and (waiting.step > ledger.length or (waiting.step == ledger.length and not open_to_all))
        if state.progress.phase in ("training", "evaluating_after") and not early:
            try:
                step = state.groups.take(waiting.step, self._step_seed(waiting.step))
            except LedgerError as error:
                return m.Refused(code="bad_message", reason=str(error))
            if step and (follows or not state.lacking(step)):
                try:
                    return batch_for(state, step, kind)
                except PayloadLostError:
                    if not follows or step.digest is None:
                        raise
                    return m.Skip(step=step.step + 1)  # it is trained already, and known from the trainer alone
            if not step and state.groups.ended(waiting.step):
                last = waiting.step >= state.settings.steps
                reason = "the run's last step is done" if last else state.progress.early or "the prompts ended"
                return m.Exhausted(steps=waiting.step, reason=reason)
        if now - waiting.since > NOT_READY_AFTER_S:
            reason = f"step {waiting.step} waits: {stall_reason(state)}"
            log.warning("stall", step=waiting.step, reason=reason)
            return m.Refused(code="not_ready", reason=reason)
        return None

    def _step_seed(self, step: int) -> int:
        digest = hashlib.sha256(f"{self._state.settings.seed}/{step}".encode()).digest()
        return int.from_bytes(digest[:4], "little")


def _sendable(prompt: Prompt) -> Prompt:
    """``prompt``, once it is known to survive the wire. Raises `WireError` where its truth holds what cannot."""
    wire.check(prompt.model_dump())
    return prompt
