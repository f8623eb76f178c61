"""The broker: one thread that receives, applies the rules, makes the turn durable, and only then answers."""

from __future__ import annotations

import time
from typing import Any

import structlog

from penstock.protocols import messages as m
from penstock.services.broker.handlers import Answers
from penstock.services.broker.scheduler import Scheduler
from penstock.services.broker.state import BrokerSettings, BrokerState, Phase
from penstock.services.broker.status import books, stall_reason, state
from penstock.services.runtime import health

log = structlog.get_logger()

AWAY_S = 3.0
"""A turn that began so long after the one before means that this process was stopped."""
LINGER_S = 10.0
"""How long the broker stays for observers once the run is over."""
LEAVE_S = 130.0
"""How long it waits for actors to leave: the trainer may have a checkpoint to write."""


class Broker:
    """See the module's docstring. `serve` runs until the run is over or `stop` was called."""

    def __init__(self, settings: BrokerSettings, store_url: str) -> None:
        self._desk = BrokerState(settings, store_url)
        self._dispatch = Scheduler(self._desk)
        self._answers = Answers(self._desk, self._dispatch)
        self._over_since: float | None = None
        self._alone_since: float | None = None
        self._met = False
        self._actors_at = self._stop_at = self._turn_at = 0.0
        self._written: dict[str, Any] = {}
        self._restore()

    def _restore(self) -> None:
        """Takes up a run where an earlier broker left it."""
        desk, progress = self._desk, self._desk.progress
        rows = desk.store.rows("broker")
        if not rows:
            return
        row = rows["all"]
        progress.totals |= row["totals"]
        desk.evaluation.results |= row["evaluations"]
        desk.evaluation.steps |= row["evaluated"]
        progress.training_since, progress.trained_until = row["training_since"], row["trained_until"]
        progress.started_at, progress.final_checkpoint = row["started_at"], row["final_checkpoint"]
        now = time.time()
        if progress.training_since:  # the time that no broker was there is not training time
            away = now - row["at"]
            progress.training_since += away
            progress.started_at += away
        desk.experience.leases.extend(now + desk.settings.broker.lease_s)
        progress.totals["taken_up"] += 1
        log.info("took up a run", committed=desk.experience.ledger.committed, away_s=round(now - row["at"], 1))

    def _remember(self) -> None:
        """What a broker that takes over must know beside the books; written when it changes."""
        desk, progress = self._desk, self._desk.progress
        row = {
            "totals": dict(progress.totals),
            "evaluations": dict(desk.evaluation.results),
            "evaluated": dict(desk.evaluation.steps),
            "training_since": progress.training_since,
            "trained_until": progress.trained_until,
            "started_at": progress.started_at,
            "final_checkpoint": progress.final_checkpoint,
        }
        if row != self._written:
            self._written = row
            desk.store.put("broker", "all", {**row, "at": time.time()})

    @property
    def address(self) -> str:
        """Where others reach this broker."""
        return self._desk.settings.broker.advertise or self._desk.exchange.address.replace("//0.0.0.0:", "//127.0.0.1:")

    def stop(self, reason: str) -> None:
        """Ends the run; safe from a signal handler."""
        self._desk.progress.stop(reason)

    @property
    def state(self) -> dict[str, Any]:
        """As observers see it (`protocols.messages.Status`)."""
        return state(self._desk)

    @property
    def books(self) -> m.LedgerReply:
        """As observers see them."""
        return books(self._desk)

    def serve(self) -> str | None:
        """Runs until the run is over. Returns the error that ended it, if one did."""
        desk = self._desk
        log.info("listening", address=self.address)
        try:
            while not self._over():
                health.beat()
                for identity, request, message in desk.exchange.receive(0.02):
                    self._answers.handle(identity, request, message)
                self._turn()
                self._remember()
                self._commit()
                desk.exchange.flush()
        finally:
            desk.records.close()
            desk.exchange.close()
        return desk.progress.error

    def _commit(self) -> None:
        """Makes the turn durable. If that took long, the store was away: nobody's deadline runs meanwhile."""
        desk = self._desk
        waited = desk.store.waited_s
        desk.store.commit()
        waited = desk.store.waited_s - waited
        if waited > 0.5:
            log.warning("the store was away", waited_s=round(waited, 1))
            desk.members.excuse(waited)
            desk.experience.leases.extend(time.time() + desk.settings.broker.lease_s)

    def _turn(self) -> None:
        desk, progress = self._desk, self._desk.progress
        now = time.time()
        self._excuse(now)
        for member in desk.members.silent(now, desk.settings.broker.dead_after_s):
            log.warning("member is dead", member=member.name, silent_s=desk.settings.broker.dead_after_s)
            desk.lost(member)
        for lease, holder in desk.experience.leases.expire(now):
            log.warning("lease expired", group=lease.number, attempt=lease.attempt, holder=holder)
            desk.give_back(holder)
        for entry, holder in desk.experience.replay.expire(now):
            log.warning("offer expired", group=entry.number, holder=holder)
            desk.give_back(holder)
        for holder in desk.evaluation.expire(now):
            desk.give_back(holder)
        if progress.stop_reason and progress.phase not in ("stopping", "done"):
            self._enter("stopping")
        self._advance()
        self._watch_for_stalls(now)
        if progress.phase in ("stopping", "done"):
            if now - self._stop_at > 1.0:  # repeated, in case one was missed
                self._stop_at = now
                for member in desk.members:
                    if member.kind != "observer":
                        desk.exchange.send(
                            member.identity, m.Stop(reason=progress.stop_reason or "the run is complete")
                        )
        else:
            self._dispatch.grant(now)
            self._dispatch.offer("reward")
            self._dispatch.offer("reference")
            self._dispatch.serve_take(now)
        if now - self._actors_at >= 1.0:
            self._actors_at = now
            now_state = state(desk)
            desk.records.actors(now_state["members"], now_state["queues"])

    def _watch_for_stalls(self, now: float) -> None:
        """Names the group, the actor and the wait when no step completes."""
        desk, progress = self._desk, self._desk.progress
        if progress.phase not in ("starting", "training") or now - progress.at < desk.settings.broker.stall_s:
            progress.stall = None
            return
        reason = stall_reason(desk)
        if reason != progress.stall:
            log.error("stall", step=desk.experience.ledger.committed, since_s=round(now - progress.at), reason=reason)
        progress.stall = reason

    def _excuse(self, now: float) -> None:
        """Where this process itself was stopped for a while, the silence was its own."""
        took, self._turn_at = now - self._turn_at if self._turn_at else 0.0, now
        if took > AWAY_S:
            log.warning("the broker was away", seconds=round(took, 1))
            self._desk.members.excuse(took)
            self._desk.experience.leases.extend(now + self._desk.settings.broker.lease_s)

    def _advance(self) -> None:
        desk, progress = self._desk, self._desk.progress
        exact = bool(desk.evaluation.size)
        committed = desk.experience.ledger.committed
        self._met = self._met or any(True for _ in desk.members)
        if progress.phase == "starting" and self._complete(committed, exact):
            self._enter("done")  # the broker before this one has seen it all, and ended before it could say so
        # A trainer that redoes steps publishes nothing before it is through, so nobody may wait for weights first.
        serving = progress.redoing or any(r.version >= 0 for r in desk.members.of_kind("rollout"))
        if progress.phase == "starting" and serving:
            if exact and committed == 0 and "before" not in desk.evaluation.results:
                desk.evaluation.start("before", 0, exact=0)
                self._enter("evaluating_before")
            else:
                self._enter("training")
        elif progress.phase == "evaluating_before" and desk.evaluation.round is None:
            self._enter("training")
        elif progress.phase == "training" and desk.experience.ended(committed) and desk.evaluation.round is None:
            if exact and desk.evaluation.steps.get("after") != committed:
                desk.evaluation.start("after", committed, exact=committed)
            self._enter("evaluating_after")
        elif (
            progress.phase == "evaluating_after"
            and not desk.evaluation.round
            and progress.final_checkpoint >= committed
        ):
            self._enter("done")
        filtered = desk.experience.consecutive_filtered
        if filtered >= desk.settings.replay.max_consecutive_filtered and not progress.error:
            progress.error = (
                f"{filtered} groups in a row had rewards that are all equal: there is nothing left to learn"
            )
            self.stop(progress.error)
        if desk.experience.consecutive_drops >= desk.settings.broker.max_consecutive_drops and not progress.error:
            progress.error = (
                f"{desk.experience.consecutive_drops} groups were dropped in a row, the last one because: "
                f"{desk.experience.last_drop}. Mend that, or raise broker.max_consecutive_drops"
            )
            log.error("too many drops", error=progress.error)
            self.stop(progress.error)

    def _complete(self, committed: int, exact: bool) -> bool:
        """Every step is trained, evaluated and in a checkpoint."""
        desk = self._desk
        evaluated = not exact or desk.evaluation.steps.get("after") == committed
        ended = committed > 0 and desk.experience.ended(committed)
        return ended and evaluated and desk.progress.final_checkpoint >= committed

    def _enter(self, phase: Phase) -> None:
        progress = self._desk.progress
        log.info("phase", phase=phase, before=progress.phase)
        progress.phase = phase
        if phase == "training":
            progress.training_since = progress.training_since or time.time()
        if phase in ("done", "stopping"):
            self._over_since = time.time()
            progress.stop_reason = progress.stop_reason or "the run is complete"

    def _over(self) -> bool:
        if self._over_since is None:
            return False
        now = time.time()
        if any(member.kind != "observer" for member in self._desk.members):
            self._alone_since = None
            return now - self._over_since > LEAVE_S
        # Whoever watches asks for the end once all have left, however long that took.
        self._alone_since = self._alone_since or now
        observed = self._desk.progress.observed_end or (self._met and not self._desk.members.of_kind("observer"))
        return observed or now - self._alone_since > LINGER_S
