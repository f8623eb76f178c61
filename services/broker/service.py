"""The broker: one thread that receives, applies the rules, makes the turn durable, and only then answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog

from penstock.protocols import messages as m
from penstock.services.broker import best_version, clock, scoring
from penstock.services.broker.agents import AgentDesk
from penstock.services.broker.awaited import WHERE
from penstock.services.broker.batches import free_covered
from penstock.services.broker.handlers import Handlers
from penstock.services.broker.scheduler import Scheduler
from penstock.services.broker.state import BrokerSettings, BrokerState
from penstock.services.broker.status import ledger_state, live_state, stall_reason
from penstock.services.broker.tally import Tally
from penstock.services.runtime import failpoint, health
from penstock.services.runtime.address import reached_endpoint
from penstock.services.runtime.checkpoint_folders import ROLLED_BACK, versions
from penstock.services.runtime.lines import each_line

log = structlog.get_logger()

EXPIRE_EVERY_S = 0.2
WRITE_S = 5.0
"""So often it is written down that there is a broker, whatever it does: the time without one is not the run's."""
STALL_EVERY_S = 1.0
"""Between two looks at what a run waits for."""
LINGER_S = 10.0
"""How long the broker stays for observers once the run is over."""
LEAVE_S, LEARNER_LEAVE_S = 130.0, 3700.0
"""How long it waits for actors to leave; for a learner, which may have a large checkpoint to write."""


class Broker:
    """See the module's docstring. `serve` runs until the run is over or `stop` was called; a ``supervised`` one waits
    at the end until its supervisor, which may not have reached it yet, has seen it."""

    def __init__(self, settings: BrokerSettings, store_url: str, supervised: bool = False) -> None:
        self._state = BrokerState(settings, store_url)
        self._supervised = supervised
        self._scheduler = Scheduler(self._state)
        self._agents = AgentDesk(self._state, self._scheduler)
        self._handlers = Handlers(self._state, self._scheduler, self._agents)
        self._over_since: float | None = None
        self._alone_since: float | None = None
        self._met = False
        self._cut_short: list[Any] | None = None
        """The evaluation that the broker before this one had begun."""
        self._stall_at = self._actors_at = self._stop_at = self._turn_at = self._expire_at = 0.0
        self._written: dict[str, Any] = {}
        self._written_at = 0.0
        self._left = False
        self._freeing = False
        """There are steps that a checkpoint covers, and that are not freed yet."""
        self._restore()

    def _restore(self) -> None:
        """Takes up a run where an earlier broker left it."""
        state, progress = self._state, self._state.progress
        rows = state.store.rows("broker")
        if not rows:
            best_version.recall(state)
            steps, back = _done_before(state.settings.folder), state.settings.folder / ROLLED_BACK
            if steps and back.is_file():
                back.unlink()
                progress.totals["rolled_back"] = steps
                log.info("goes on from where penstock rollback took it", version=steps)
            elif steps:
                progress.totals["not_in_store"] = steps
                log.error("the store knows nothing of this run, which goes on all the same", steps=steps)
            return
        row = rows["all"]
        progress.totals |= row["totals"]
        progress.tallies = {name: Tally(**said) for name, said in row.get("tallies", {}).items()}
        self._cut_short = row.get("evaluating")
        best_version.remember_measure(state, row)
        best_version.take_up(state, row.get("early", {}))
        progress.training_since, progress.trained_until = row["training_since"], row["trained_until"]
        progress.started_at = row["started_at"]
        progress.checkpoints |= row.get("checkpoints", {})
        progress.final_checkpoints |= row.get("final_checkpoints", {})
        progress.learned |= row.get("learned", {})
        now = clock.now()
        away = max(0.0, now - row["at"])  # in which there was no broker; a clock may have been set back
        progress.started_at += away
        if progress.training_since and not progress.trained_until:
            progress.training_since += away
        self._extend_deadlines(now)
        scoring.complete(state)
        progress.totals["taken_up"] += row.get("phase") not in m.ENDED
        log.info("took up a run", committed=state.groups.ledger.committed, away_s=round(now - row["at"], 1))

    def _remember(self) -> None:
        """What a broker that takes over must know beside the groups; written when it changes, and every `WRITE_S`."""
        state, progress = self._state, self._state.progress
        row = {
            "totals": dict(progress.totals),
            "tallies": {name: tally.row() for name, tally in progress.tallies.items()},
            "evaluating": self._evaluating(),
            "training_since": progress.training_since,
            "trained_until": progress.trained_until,
            "started_at": progress.started_at,
            "checkpoints": dict(progress.checkpoints),
            "final_checkpoints": dict(progress.final_checkpoints),
            "learned": dict(progress.learned),
            "early": best_version.early_end(state),
            "measured": best_version.measure(state),
            "measured_since": progress.measured_since,
            "phase": progress.phase,
        }
        now = clock.now()
        if row != self._written or now - self._written_at > WRITE_S:
            self._written, self._written_at = row, now
            state.store.put("broker", "all", {**row, "at": now})

    def _evaluating(self) -> list[Any] | None:
        """Label and step of the round that a broker which takes over must begin again, if there is one; those before
        and after training it begins by itself."""
        under_way = self._state.evaluation.round
        if under_way is None:
            return self._cut_short
        return [under_way.label, under_way.step] if under_way.exact is None else None

    @property
    def address(self) -> str:
        """Where others reach this broker."""
        return self._state.settings.broker.advertise or reached_endpoint(self._state.router.address)

    def stop(self, reason: str) -> None:
        """Ends the run; safe from a signal handler."""
        self._state.progress.stop(reason)

    def leave(self) -> None:
        """Ends this process alone: another broker takes the run up, unless that is at its end. Safe from a signal
        handler."""
        self._left = self._state.progress.phase not in m.ENDED

    @property
    def state(self) -> dict[str, Any]:
        """As observers see it (`protocols.messages.Status`)."""
        return live_state(self._state)

    @property
    def ledger_state(self) -> m.LedgerReply:
        """As observers see them."""
        return ledger_state(self._state)

    def serve(self) -> str | None:
        """Runs until the run is over. Returns the error that ended it, if one did."""
        state = self._state
        log.info("listening", address=self.address)
        try:
            while not self._left and (self._freeing or not self._over()):
                health.beat()
                for identity, request, message in state.meanwhile.said() or state.router.receive(0.02):
                    self._handlers.handle(identity, request, message)
                self._turn()
                self._remember()
                self._commit()
                state.router.flush()
                self._freeing = free_covered(state)
        finally:
            state.recorder.close(state.progress.error)
            if state.exporter:
                state.exporter.close()
            state.traces.close()
            state.router.close()
        return state.progress.error

    def _commit(self) -> None:
        """Makes the turn durable. If that took long, the store was away: nobody's deadline runs meanwhile."""
        state = self._state
        waited, step = state.store.waited_s, state.progress.committing
        if step is not None:
            failpoint.reach("commit-applied", step)
        state.store.commit()
        state.payloads.settled()
        if step is not None:
            state.progress.committing = None
            failpoint.reach("commit-durable", step)
        waited = state.store.waited_s - waited
        if waited > 0.5:
            log.warning("the store was away", waited_s=round(waited, 1))
            now = self._turn_at = clock.now()
            state.members.excuse(waited, now)
            self._extend_deadlines(now)

    def _turn(self) -> None:
        state, progress = self._state, self._state.progress
        now = clock.now()
        self._excuse(now)
        for member in state.members.silent(now, state.settings.broker.dead_after_s):
            log.warning("member is dead", member=member.name, silent_s=state.settings.broker.dead_after_s)
            state.lost(member)
        if now - self._expire_at >= EXPIRE_EVERY_S:
            self._expire_at = now
            self._expire(now)
        if progress.stop_reason and progress.phase not in m.ENDED:
            self._enter("stopping")
        state.serve_newest()
        self._advance()
        self._watch_for_stalls(now)
        if progress.phase in m.ENDED:
            if now - self._stop_at > 1.0:  # repeated, in case one was missed
                self._stop_at = now
                for member in state.members:
                    if member.kind != "observer":
                        state.router.send(member.identity, m.Stop(reason=progress.stop_reason or "the run is complete"))
        else:
            (self._agents if state.settings.agents else self._scheduler).grant(now)
            for scorer in state.scorers:
                self._scheduler.offer(scorer)
            self._scheduler.serve_take(now)
        if state.receivers_changed:
            state.receivers_changed = False
            state.tell_trainer(state.receivers())
        if now - self._actors_at >= 1.0:
            self._actors_at = now
            shown = live_state(state, whole=False)
            state.recorder.actors(shown["members"], shown["queues"], shown["lost"])
            if state.exporter:
                state.exporter.show(shown)

    def _expire(self, now: float) -> None:
        """Work of holders that do not renew it is free again."""
        for holds in self._state.holds():
            for number, holder in holds.expire(now):
                log.warning("deadline passed", group=number, holder=holder)
                self._state.give_back(holder)

    def _extend_deadlines(self, now: float) -> None:
        """The broker was away: what could not be renewed is not lost."""
        for holds in self._state.holds():
            holds.extend(now + self._state.settings.broker.lease_s)

    def _watch_for_stalls(self, now: float) -> None:
        """Names the group, the actor and the wait when no step completes, and no evaluation before or after them."""
        state, progress = self._state, self._state.progress
        if progress.phase in m.ENDED or now - progress.at < state.settings.broker.stall_s:
            progress.stall = None
            return
        if now < self._stall_at:
            return
        self._stall_at = now + STALL_EVERY_S
        reason = stall_reason(state)
        if reason.partition(WHERE)[0] != (progress.stall or "").partition(WHERE)[0]:  # agents take turns by the second
            log.error("stall", step=state.groups.ledger.committed, since_s=round(now - progress.at), reason=reason)
        progress.stall = reason

    def _excuse(self, now: float) -> None:
        """Where this process itself was stopped for a while, the silence was its own."""
        took, self._turn_at = now - self._turn_at if self._turn_at else 0.0, now
        if took > health.AWAY_S:
            log.warning("the broker was away", seconds=round(took, 1))
            self._state.members.excuse(took, now)
            self._extend_deadlines(now)

    def _advance(self) -> None:
        state, progress = self._state, self._state.progress
        exact = bool(state.evaluation.size)
        committed = state.groups.ledger.committed
        self._met = self._met or any(True for _ in state.members)
        if progress.phase == "starting" and self._complete(committed, exact):
            self._enter("done")  # the broker before this one has seen it all, and ended before it could say so
        # A trainer that redoes steps publishes nothing before it is through, so nobody may wait for weights first.
        serving = progress.redoing or any(r.version >= 0 for r in state.members.of_kind("rollout"))
        if progress.phase == "starting" and serving:
            first = exact and committed == 0 and "before" not in state.evaluation.results
            if first and (state.settings.prompts.eval_before or not state.settings.steps):
                state.evaluation.start("before", 0, exact=0)
                self._enter("evaluating_before")
            else:
                self._enter("training")
        elif progress.phase == "evaluating_before" and state.evaluation.round is None:
            self._enter("training")
        elif progress.phase == "training" and self._cut_short and state.evaluation.round is None:
            (label, step), self._cut_short = self._cut_short, None
            if exact and label not in state.evaluation.results:
                state.evaluation.start(label, step, exact=None)
        elif progress.phase == "training" and state.groups.ended(committed) and state.evaluation.round is None:
            if exact and committed and state.evaluation.steps.get("after") != committed:
                state.evaluation.start("after", committed, exact=committed)
            self._enter("evaluating_after")
        elif progress.phase == "evaluating_after" and not state.evaluation.round and self._saved(committed):
            self._enter("done")
        filtered = state.groups.consecutive_filtered
        if filtered >= state.settings.replay.max_consecutive_filtered and not progress.error:
            progress.error = (
                f"{filtered} groups in a row were left out by replay.filter, the last one being "
                f"{state.groups.last_filtered}: there is nothing left to learn"
            )
            self.stop(progress.error)
        if state.groups.consecutive_drops >= state.settings.broker.max_consecutive_drops and not progress.error:
            progress.error = (
                f"{state.groups.consecutive_drops} groups were dropped in a row, the last one because: "
                f"{state.groups.last_drop}. Mend that, or raise broker.max_consecutive_drops"
            )
            log.error("too many drops", error=progress.error)
            self.stop(progress.error)

    def _complete(self, committed: int, exact: bool) -> bool:
        """Every step is trained, evaluated and in a checkpoint."""
        state = self._state
        evaluated = not exact or state.evaluation.steps.get("after") == committed
        ended = committed > 0 and state.groups.ended(committed)
        return ended and evaluated and self._saved(committed)

    def _saved(self, committed: int) -> bool:
        """Every step is in the checkpoint that ends the run, and in the archive, where there is one."""
        state = self._state
        archived = not state.archive.wanted or not state.groups.ledger.covered(state.covered())
        return archived and state.ended_with() >= committed

    def _enter(self, phase: m.Phase) -> None:
        progress = self._state.progress
        log.info("phase", phase=phase, before=progress.phase)
        progress.phase = phase
        if phase == "training":
            now = clock.now()
            if progress.training_since and progress.trained_until:  # of a run that goes on: nothing was trained since
                progress.training_since += now - progress.trained_until
                progress.trained_until = now
            progress.training_since = progress.training_since or now
        if phase in m.ENDED:
            self._over_since = clock.now()
            progress.stop_reason = progress.stop_reason or "the run is complete"

    def _over(self) -> bool:
        if self._over_since is None:
            return False
        now = clock.now()
        here = {member.kind for member in self._state.members} - {"observer"}
        if here:
            self._alone_since = None
            learning = not here.isdisjoint(self._state.settings.learners)
            return now - self._over_since > (LEARNER_LEAVE_S if learning else LEAVE_S)
        # Whoever watches asks for the end once all have left, however long that took.
        self._alone_since = self._alone_since or now
        watched = self._supervised or not self._met or bool(self._state.members.of_kind("observer"))
        return self._state.progress.observed_end or not watched or now - self._alone_since > LINGER_S


def _done_before(folder: Path) -> int:
    """Steps that the run's own files know of."""
    said = (row.get("step", -1) for row in each_line(folder / "ledger.jsonl"))
    return max(*versions(folder / "checkpoints"), *(step + 1 for step in said), 0, 0)
