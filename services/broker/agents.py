"""Agents outside the pipeline: groups to the gateways that hold their sessions, turns of these to rollouts.

A turn is answered by a rollout whose version the gate allows for its group at that moment, and what it asks for only
falls, as groups are dropped: so the bound holds for every token, however often a session moves (docs/bounded-lag.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from penstock.protocols import messages as m
from penstock.protocols.experience import ExperienceError, Sampling, as_bytes
from penstock.services.broker.granting import Room, Suspects, alone
from penstock.services.broker.membership import Member
from penstock.services.broker.rules.holds import SUSPECT_AFTER
from penstock.services.broker.rules.leases import Leases
from penstock.services.broker.rules.turns import Turn
from penstock.services.broker.scheduler import Scheduler
from penstock.services.broker.state import BrokerState

log = structlog.get_logger()


class NotHeldError(RuntimeError):
    """What a gateway says is about a group that it does not hold (any more)."""


@dataclass(frozen=True)
class _Wanted:
    """What a rollout must know of a turn; two are the same where they ask for the same."""

    prompt: bytes
    sampling: Sampling
    stream: int
    known: int
    pictures: tuple[bytes, ...]
    sampled: bytes | None
    unread: bool

    @classmethod
    def of(cls, asked: m.TurnRequest) -> _Wanted:
        sampled = None if asked.sampled is None else asked.sampled.tobytes()
        pictures = tuple(picture.tobytes() for picture in asked.pictures)
        unread = asked.key.purpose == "eval"
        return cls(asked.prompt.tobytes(), asked.sampling, asked.stream, asked.known, pictures, sampled, unread)

    def generate(self, id: int, seed: int) -> m.Generate:
        """For the rollout."""
        return m.Generate(
            id=id, seed=seed, prompt=as_bytes(self.prompt), sampling=self.sampling, stream=self.stream,
            known=self.known, pictures=[as_bytes(picture) for picture in self.pictures],
            sampled=None if self.sampled is None else as_bytes(self.sampled), unread=self.unread,
        )  # fmt: skip


class AgentDesk:
    """Beside the scheduler: who works for agents, in a run that has gateways."""

    def __init__(self, state: BrokerState, scheduler: Scheduler) -> None:
        self._state, self._scheduler = state, scheduler

    # --- giving out --------------------------------------------------------------------------------------------------

    def grant(self, now: float) -> None:
        """Groups to gateways with room, and waiting turns to rollouts with room."""
        state = self._state
        for identity, ids in state.turns.unwanted().items():
            if state.members.get(identity):
                state.router.send(identity, m.Unwanted(ids=ids))
        rollouts = [r for r in state.members.of_kind("rollout") if state.serves_current(r)]
        gateways = [gateway for gateway in state.members.of_kind("gateway") if gateway.room > 0]
        if self._scheduler.evaluation_served():  # else its turns would only wait
            self._scheduler.grant_evaluation(gateways, now)
        if state.progress.phase == "training" and not self._scheduler.evaluation_waits_for_room():
            self._grant_training(Room(gateways), max((r.version for r in rollouts), default=-2), now)
        suspected = alone(state.turns.holds, state.turns.open)
        self._grant_turns([r for r in rollouts if r.room > 0 and r.identity not in suspected], now)

    def _grant_training(self, gateways: Room, newest: int, now: float) -> None:
        while gateways and (lease := self._scheduler.next_group(newest)):
            gateway = gateways.take(None)
            if gateway is None:
                return
            self._scheduler.lease("train", lease, gateway, now)
            gateways.put_back(gateway)

    def _grant_turns(self, rollouts: list[Member], now: float) -> None:
        """``rollouts``: those with room."""
        state = self._state
        suspects = Suspects(rollouts, [state.turns.holds.holders()], state.settings.broker.max_attempts)
        # Bounds within which nobody with room serves a version: thousands of turns may have the same.
        in_vain: set[tuple[int, int | None]] = set()
        for turn in state.turns.waiting():
            if turn.attempt >= state.settings.broker.max_attempts:
                state.turns.answered(turn.id)
                self._answer(turn, b"", f"given to {turn.attempt} {m.UNANSWERED}")
                continue
            if not (rollouts or suspects.open) or (bounds := self._bounds(turn)) in in_vain:
                continue
            oldest, exact = bounds
            if turn.attempt >= SUSPECT_AFTER:
                if suspects.waits:
                    continue
                if not suspects.serve(oldest, exact is not None):  # nor is it to hold up those that somebody serves
                    in_vain.add(bounds)
                elif chosen := suspects.take(turn.attempt, oldest, exact is not None):
                    self._grant_turn(turn, chosen, now)
                continue
            if not rollouts:
                continue
            able = [r for r in rollouts if r.version >= oldest and exact in (None, r.version)]
            if not able:
                in_vain.add(bounds)
                continue
            last = state.turns.last_holder(turn)
            chosen = next((r for r in able if r.identity == last), None) or max(able, key=lambda r: (r.room, r.name))
            self._grant_turn(turn, chosen, now)
            if chosen.room <= 0:
                rollouts.remove(chosen)

    def _grant_turn(self, turn: Turn, rollout: Member, now: float) -> None:
        state = self._state
        state.turns.grant(turn, rollout.identity, now + state.settings.broker.lease_s)
        rollout.given += 1
        seed = state.settings.seed if turn.group[0] == "train" else 0
        state.router.send(rollout.identity, turn.request.generate(turn.id, seed))

    def _bounds(self, turn: Turn) -> tuple[int, int | None]:
        """The oldest version that may answer a turn now, and the only one, if there is one."""
        purpose, number = turn.group
        if purpose == "train":
            return self._state.groups.gate.required_version(number), None
        round = self._state.evaluation.round
        return (round.least, round.exact) if round else (-1, None)

    # --- messages ----------------------------------------------------------------------------------------------------

    def on_turn(self, member: Member, request: int, asked: m.TurnRequest) -> None:
        """Answered now where its answer is known."""
        state, key = self._state, asked.key
        group = key.purpose, key.number
        self._held(member, *group)
        kept, note = state.records.of(group), asked.note.tobytes()
        if kept.get(key.note_record) == note:
            state.router.send(member.identity, m.TurnAnswer(answer=as_bytes(kept[key.answer_record])), request)
            return
        # An answer to another gateway's question, which came after this one was given the group.
        state.records.discard(group, key.note_record)
        state.records.discard(group, key.answer_record)
        turn = state.turns.ask(group, key, (*group, key.place), _Wanted.of(asked), (member.identity, request))
        turn.note = note

    def on_generated(self, member: Member, request: int, said: m.Generated) -> None:
        """What a rollout answers; durable with this turn of the broker."""
        state, turn = self._state, self._state.turns.get(said.id)
        if turn is not None:
            self._take(turn, member, said)
        state.router.send(member.identity, m.Ack(), request)

    def _take(self, turn: Turn, member: Member, said: m.Generated) -> None:
        state, key = self._state, turn.key
        assert isinstance(key, m.TurnKey)
        if said.error:
            state.turns.answered(turn.id, member.identity)
            self._answer(turn, b"", said.error)
            return
        if said.newest > max(state.versions.latest, state.groups.ledger.committed):
            raise ExperienceError(f"a turn has tokens of version {said.newest}, which does not exist yet")
        oldest, exact = self._bounds(turn)
        if said.oldest < oldest or (exact is not None and (said.oldest, said.newest) != (exact, exact)):
            log.warning("a turn is of a wrong version", group=turn.group, sender=member.name, oldest=said.oldest)
            state.turns.holds.free(turn.id)
            return
        state.turns.answered(turn.id, member.identity)
        answer = said.answer.tobytes()
        state.records.keep((key.purpose, key.number), key.note_record, turn.note)
        state.records.keep((key.purpose, key.number), key.answer_record, answer)
        self._leases(key.purpose).gets_on(key.number)
        self._answer(turn, answer)

    def on_note(self, member: Member, request: int, note: m.Note) -> None:
        """What a gateway will want to know of a session, should it die."""
        self._held(member, note.purpose, note.number)
        self._state.records.keep((note.purpose, note.number), note.name, note.data.tobytes())
        self._state.router.send(member.identity, m.Ack(), request)

    def on_give_back(self, member: Member, request: int, given: m.GiveBack) -> None:
        """The group is for another gateway."""
        leases = self._held(member, given.purpose, given.number)
        leases.give_back(given.number)
        self._state.turns.end((given.purpose, given.number))
        self._state.router.send(member.identity, m.Ack(), request)

    def _leases(self, purpose: str) -> Leases:
        return self._state.groups.leases if purpose == "train" else self._state.evaluation.leases

    def _held(self, member: Member, purpose: str, number: int) -> Leases:
        """Where this gateway holds it. Raises `NotHeldError` unless this gateway holds the group."""
        leases = self._leases(purpose)
        if leases.holder(number) != member.identity:
            raise NotHeldError(f"{purpose} group {number} is not leased to {member.identity} (any more)")
        return leases

    def _answer(self, turn: Turn, answer: bytes, error: str = "") -> None:
        identity, request = turn.asked_by
        if self._state.members.get(identity):
            self._state.router.send(identity, m.TurnAnswer(answer=as_bytes(answer), error=error), request)
