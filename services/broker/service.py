"""The broker: one thread that receives, applies the rules, makes the turn durable, and only then answers."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import structlog

from protocols import messages as m
from protocols import wire
from protocols.experience import ExperienceError, Group, Prompt, Sampling, as_bytes, unpack_group
from protocols.keys import BrokerKeys
from protocols.mailbox import Exchange
from services.broker.archive import Archive
from services.broker.config import BrokerConfig, GateConfig, PromptsConfig, ReplayConfig, StoreConfig
from services.broker.data import DataError, open_source
from services.broker.evaluation import Evaluation, Round
from services.broker.experience import Experience
from services.broker.gate import Gate
from services.broker.ledger import LedgerError, Step
from services.broker.membership import Member, Members, MembershipError
from services.broker.prompts import PromptStream
from services.broker.records import Records
from services.broker.replay import Entry, Scorer
from services.broker.store import Store, StoreError
from services.broker.versions import Versions

log = structlog.get_logger()

Phase = Literal["starting", "evaluating_before", "training", "evaluating_after", "done", "stopping"]

NOT_READY_AFTER_S = 15.0
"""A take that cannot be served for this long is answered with the reason."""
AWAY_S = 3.0
"""A turn that began so long after the one before means that this process was stopped."""
LINGER_S = 10.0
"""How long the broker stays for observers once the run is over."""
SAMPLED_STEPS = 40
"""Samples are kept of about this many steps."""


SENDERS: dict[type[m.Message], set[m.ActorKind]] = {
    m.Finished: {"rollout"},
    m.Failed: {"rollout"},
    m.Loaded: {"rollout"},
    m.LoadFailed: {"rollout"},
    m.Scored: {"reward"},
    m.Referenced: {"reference"},
    m.LedgerTail: {"trainer"},
    m.Take: {"trainer"},
    m.Commit: {"trainer"},
    m.Checkpointed: {"trainer"},
    m.Publish: {"trainer"},
    m.StopRun: {"observer"},
}
"""Who may say what; anything else is for every member."""


@dataclass(frozen=True)
class BrokerSettings:
    """Everything the broker needs to know."""

    run: str
    folder: Path
    seed: int
    steps: int
    broker: BrokerConfig
    gate: GateConfig
    store: StoreConfig
    replay: ReplayConfig
    prompts: PromptsConfig
    sampling: Sampling
    eval_sampling: Sampling
    with_reference: bool
    tensorboard: bool
    deterministic: bool = False
    keys: BrokerKeys | None = None
    """Needed where ``broker.bind`` is not on the loopback."""
    store_key: str | None = None
    """The run's own key: a store with another is another run's."""


@dataclass(slots=True)
class _Waiting:
    """A trainer that has asked for a step."""

    identity: str
    request: int
    step: int
    since: float


class Broker:
    """See the module's docstring. `serve` runs until the run is over or `stop` was called."""

    def __init__(self, settings: BrokerSettings, store_url: str) -> None:
        self._settings = settings
        self._store = Store(store_url, settings.run, settings.store, settings.store_key)
        stream = open_source(settings.prompts.train)
        self._prompts = PromptStream(stream, settings.seed, settings.prompts.shuffle, settings.prompts.epochs)
        held_out = open_source(settings.prompts.eval, held_out=True) if settings.prompts.eval else []
        self._held_out = held_out
        self._evaluation = Evaluation(min(settings.prompts.eval_size, len(held_out)))
        scorers: list[Scorer] = ["reward", "reference"] if settings.with_reference else ["reward"]
        gate = Gate(settings.gate.groups_per_step, settings.gate.window, settings.gate.max_lag)
        self._records = Records(settings.folder, settings.tensorboard)
        self._archive = Archive(settings.folder, settings.replay.archive)
        self._experience = Experience(
            self._store,
            gate,
            scorers,
            settings.steps,
            self._prompts.limit,
            settings.gate.prefetch,
            self._store.delete_payloads,
            self._archive_step,
            self._records.drop,
        )
        self._versions = Versions(self._store)
        self._members = Members(self._store)
        self._payloads: dict[int, bytes] = {}
        self._take: _Waiting | None = None
        self._phase: Phase = "starting"
        self._final_checkpoint = 0
        """The version of the checkpoint that ended the run."""
        self._stop_reason: str | None = None
        self._error: str | None = None
        self._started_at = time.time()
        self._training_since: float | None = None
        self._trained_until: float | None = None
        self._over_since: float | None = None
        self._observed_end = False
        self._actors_at = 0.0
        self._stop_at = 0.0
        self._turn_at = 0.0
        self._progress_at = time.time()
        self._stall: str | None = None
        self._last_metrics: dict[str, Any] = {}
        self._totals = {"leased": 0, "finished": 0, "trained": 0, "generated_tokens": 0, "trained_tokens": 0}
        self._totals |= {"reward_errors": 0, "late_answers": 0, "lag_max": 0, "tokens_lagging": 0}
        self._written: dict[str, Any] = {}
        self._restore()
        self._handlers: dict[type[m.Message], Callable[[Member, int, Any], None]] = {
            m.Heartbeat: self._on_heartbeat,
            m.Bye: self._on_bye,
            m.Credit: self._on_credit,
            m.Finished: self._on_finished,
            m.Failed: self._on_failed,
            m.Scored: self._on_scored,
            m.Referenced: self._on_referenced,
            m.LedgerTail: self._on_ledger_tail,
            m.Take: self._on_take,
            m.Commit: self._on_commit,
            m.Checkpointed: self._on_checkpointed,
            m.Publish: self._on_publish,
            m.Loaded: self._on_loaded,
            m.LoadFailed: self._on_load_failed,
            m.StatusRequest: self._on_status,
            m.LedgerRequest: self._on_ledger,
            m.StopRun: self._on_stop_run,
        }
        self.exchange = Exchange(
            settings.broker.bind, settings.keys
        )  # last: nothing after it can fail and leave a socket open

    def _restore(self) -> None:
        """Takes up a run where an earlier broker left it."""
        rows = self._store.rows("broker")
        if not rows:
            return
        row = rows["all"]
        self._totals |= row["totals"]
        self._evaluation.results |= row["evaluations"]
        self._evaluation.steps |= row["evaluated"]
        self._training_since, self._trained_until = row["training_since"], row["trained_until"]
        self._started_at, self._final_checkpoint = row["started_at"], row["final_checkpoint"]
        now = time.time()
        if self._training_since:  # the time that no broker was there is not training time
            away = now - row["at"]
            self._training_since += away
            self._started_at += away
        self._experience.leases.extend(now + self._settings.broker.lease_s)
        log.info("took up a run", committed=self._experience.ledger.committed, away_s=round(now - row["at"], 1))

    def _remember(self) -> None:
        """What a broker that takes over must know beside the books; written when it changes."""
        row = {
            "totals": dict(self._totals),
            "evaluations": dict(self._evaluation.results),
            "evaluated": dict(self._evaluation.steps),
            "training_since": self._training_since,
            "trained_until": self._trained_until,
            "started_at": self._started_at,
            "final_checkpoint": self._final_checkpoint,
        }
        if row != self._written:
            self._written = row
            self._store.put("broker", "all", {**row, "at": time.time()})

    @property
    def address(self) -> str:
        """Where others reach this broker."""
        return self._settings.broker.advertise or self.exchange.address.replace("//0.0.0.0:", "//127.0.0.1:")

    def stop(self, reason: str) -> None:
        """Ends the run; safe from a signal handler."""
        self._stop_reason = self._stop_reason or reason

    def serve(self) -> str | None:
        """Runs until the run is over. Returns the error that ended it, if one did."""
        log.info("listening", address=self.address)
        try:
            while not self._over():
                for identity, request, message in self.exchange.receive(0.02):
                    self._handle(identity, request, message)
                self._turn()
                self._remember()
                self._commit()
                self.exchange.flush()
        finally:
            self._records.close()
            self.exchange.close()
        return self._error

    def _commit(self) -> None:
        """Makes the turn durable. If that took long, the store was away: nobody's deadline runs meanwhile."""
        waited = self._store.waited_s
        self._store.commit()
        waited = self._store.waited_s - waited
        if waited > 0.5:
            log.warning("the store was away", waited_s=round(waited, 1))
            self._members.excuse(waited)
            self._experience.leases.extend(time.time() + self._settings.broker.lease_s)

    # --- the turn ----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        now = time.time()
        self._excuse(now)
        for member in self._members.silent(now, self._settings.broker.dead_after_s):
            log.warning("member is dead", member=member.name, silent_s=self._settings.broker.dead_after_s)
            self._lost(member)
        for lease, holder in self._experience.leases.expire(now):
            log.warning("lease expired", group=lease.number, attempt=lease.attempt, holder=holder)
            self._give_back(holder)
        for entry, holder in self._experience.replay.expire(now):
            log.warning("offer expired", group=entry.number, holder=holder)
            self._give_back(holder)
        for holder in self._evaluation.expire(now):
            self._give_back(holder)
        if self._stop_reason and self._phase not in ("stopping", "done"):
            self._enter("stopping")
        self._advance()
        self._watch_for_stalls(now)
        if self._phase in ("stopping", "done"):
            if now - self._stop_at > 1.0:  # repeated, in case one was missed
                self._stop_at = now
                for member in self._members:
                    if member.kind != "observer":
                        self.exchange.send(member.identity, m.Stop(reason=self._stop_reason or "the run is complete"))
        else:
            self._grant(now)
            self._offer("reward")
            self._offer("reference")
            self._serve_take(now)
        if now - self._actors_at >= 1.0:
            self._actors_at = now
            state = self._state()
            self._records.actors(state["members"], state["queues"])

    def _watch_for_stalls(self, now: float) -> None:
        """Names the group, the actor and the wait when no step completes."""
        if self._phase not in ("starting", "training") or now - self._progress_at < self._settings.broker.stall_s:
            self._stall = None
            return
        reason = self._hold_up()
        if reason != self._stall:
            log.error(
                "stall", step=self._experience.ledger.committed, since_s=round(now - self._progress_at), reason=reason
            )
        self._stall = reason

    def _excuse(self, now: float) -> None:
        """Where this process itself was stopped for a while, the silence was its own."""
        took, self._turn_at = now - self._turn_at if self._turn_at else 0.0, now
        if took > AWAY_S:
            log.warning("the broker was away", seconds=round(took, 1))
            self._members.excuse(took)
            self._experience.leases.extend(now + self._settings.broker.lease_s)

    def _give_back(self, holder: str) -> None:
        """The credit of something that ``holder`` never got, or has lost."""
        member = self._members.get(holder)
        if member:
            member.given -= 1

    def _advance(self) -> None:
        exact = bool(self._evaluation.size)
        committed = self._experience.ledger.committed
        if self._phase == "starting" and any(r.version >= 0 for r in self._members.of_kind("rollout")):
            if exact and committed == 0 and "before" not in self._evaluation.results:
                self._evaluation.start("before", 0, exact=0)
                self._enter("evaluating_before")
            else:
                self._enter("training")
        elif self._phase == "evaluating_before" and self._evaluation.round is None:
            self._enter("training")
        elif self._phase == "training" and self._experience.ended(committed) and self._evaluation.round is None:
            if exact and self._evaluation.steps.get("after") != committed:
                self._evaluation.start("after", committed, exact=committed)
            self._enter("evaluating_after")
        elif self._phase == "evaluating_after" and not self._evaluation.round and self._final_checkpoint >= committed:
            self._enter("done")
        filtered = self._experience.consecutive_filtered
        if filtered >= self._settings.replay.max_consecutive_filtered and not self._error:
            self._error = f"{filtered} groups in a row had rewards that are all equal: there is nothing left to learn"
            self.stop(self._error)
        if self._experience.consecutive_drops >= self._settings.broker.max_consecutive_drops and not self._error:
            self._error = (
                f"{self._experience.consecutive_drops} groups were dropped in a row, the last one because: "
                f"{self._experience.last_drop}. Mend that, or raise broker.max_consecutive_drops"
            )
            log.error("too many drops", error=self._error)
            self.stop(self._error)

    def _enter(self, phase: Phase) -> None:
        log.info("phase", phase=phase, before=self._phase)
        self._phase = phase
        if phase == "training":
            self._training_since = self._training_since or time.time()
        if phase in ("done", "stopping"):
            self._over_since = time.time()
            self._stop_reason = self._stop_reason or "the run is complete"

    def _over(self) -> bool:
        if self._over_since is None:
            return False
        patience = time.time() - self._over_since
        if any(member.kind != "observer" for member in self._members):
            return patience > 60
        observed = self._observed_end or not self._members.of_kind("observer")
        return observed or patience > LINGER_S

    def _grant(self, now: float) -> None:
        """Gives evaluation prompts, then training groups, to the rollouts with the most room."""
        current = [r for r in self._members.of_kind("rollout") if self._current(r)]
        while self._experience.consecutive_drops < self._settings.broker.max_consecutive_drops:
            rollouts = [r for r in current if r.room > 0]
            if not rollouts:
                return
            rollout = max(rollouts, key=lambda r: (r.room, r.name))
            held_out = self._evaluation.waiting()
            if held_out:
                exact = self._evaluation.round.exact if self._evaluation.round else None
                fit = [r for r in rollouts if exact in (None, r.version)]
                if not fit:
                    return
                rollout = max(fit, key=lambda r: r.room)
                sampling = self._settings.eval_sampling
                try:
                    prompt = _sendable(self._held_out[held_out.index])
                except (DataError, wire.WireError) as error:
                    log.warning("evaluation prompt cannot be used", row=held_out.index, error=str(error))
                    self._evaluation_score(held_out.number, 0.0)
                    continue
                self._evaluation.hold(held_out, rollout.identity, now + self._settings.broker.lease_s)
                self._lease(
                    rollout, m.Lease(number=held_out.number, attempt=1, seed=0, prompt=prompt, sampling=sampling)
                )
                continue
            if self._phase != "training":
                return
            lease = self._experience.next_lease(rollout.version)
            if lease is None:
                ahead = max(rollouts, key=lambda r: (r.version, r.room))
                lease = self._experience.next_lease(ahead.version) if ahead is not rollout else None
                if lease is None:
                    return
                rollout = ahead
            if lease.attempt >= self._settings.broker.max_attempts:
                self._experience.drop(lease.number, f"leased {lease.attempt} times without an answer")
                continue
            try:
                prompt = _sendable(self._prompts.draw(lease.draw))
                message = m.Lease(
                    number=lease.number,
                    attempt=lease.attempt + 1,
                    seed=self._settings.seed,
                    prompt=prompt,
                    sampling=self._settings.sampling,
                )
            except (DataError, wire.WireError) as error:
                self._experience.drop(lease.number, f"its prompt cannot be used: {error}")
                continue
            if lease.attempt == 0:
                self._totals["leased"] += 1
            self._experience.leases.grant(lease, rollout.identity, now + self._settings.broker.lease_s)
            self._lease(rollout, message)

    def _lease(self, rollout: Member, lease: m.Lease) -> None:
        rollout.given += 1
        self.exchange.send(rollout.identity, lease)

    def _offer(self, scorer: Scorer) -> None:
        """Gives finished groups to the scorers of a kind, in number order, as far as their credit reaches."""
        scorers = [s for s in self._members.of_kind(scorer) if s.room > 0]
        if not scorers:
            return
        work: dict[str, list[m.WorkItem]] = {}
        deadline = time.time() + self._settings.broker.lease_s
        pending: list[Entry | Any] = list(self._evaluation.unscored()) if scorer == "reward" else []
        for item in [*pending, *self._experience.replay.unoffered(scorer)]:
            worker = max(scorers, key=lambda s: s.room)
            if worker.room <= 0:
                break
            if isinstance(item, Entry):
                if item.attempts.get(scorer, 0) >= self._settings.broker.max_attempts:
                    self._drop(item.number, f"{scorer} was offered it {item.attempts[scorer]} times without an answer")
                    continue
                self._experience.replay.offer(item, scorer, worker.identity, deadline)
                experience = self._payload(item.number)
            else:
                self._evaluation.hold(item, worker.identity, deadline)
                assert item.experience is not None
                experience = item.experience
            worker.given += 1
            work.setdefault(worker.identity, []).append(m.WorkItem(number=item.number, experience=as_bytes(experience)))
        for identity, items in work.items():
            self.exchange.send(identity, m.Work(items=items))

    def _serve_take(self, now: float) -> None:
        waiting = self._take
        if waiting is None:
            return
        if self._phase in ("training", "evaluating_after"):
            try:
                step = self._experience.take(waiting.step, self._step_seed(waiting.step))
            except LedgerError as error:
                self._take = None
                self.exchange.send(waiting.identity, m.Refused(code="bad_message", reason=str(error)), waiting.request)
                return
            if step:
                self._take = None
                self.exchange.send(waiting.identity, self._batch(step), waiting.request)
                return
            if self._experience.ended(waiting.step):
                self._take = None
                reason = "the run's last step is done" if waiting.step >= self._settings.steps else "the prompts ended"
                self.exchange.send(waiting.identity, m.Exhausted(steps=waiting.step, reason=reason), waiting.request)
                return
        if now - waiting.since > NOT_READY_AFTER_S:
            self._take = None
            reason = f"step {waiting.step} waits: {self._hold_up()}"
            log.warning("stall", step=waiting.step, reason=reason)
            self.exchange.send(waiting.identity, m.Refused(code="not_ready", reason=reason), waiting.request)

    def _hold_up(self) -> str:
        """What keeps the next step from being completed, in words."""
        steps = self._experience.ledger.steps
        if steps and steps[-1].digest is None:
            trainers = [trainer.identity for trainer in self._members.of_kind("trainer")]
            who = f"{trainers[0]} has not committed it" if trainers else "no trainer is here"
            return f"step {steps[-1].step} is taken, and {who}"
        if self._phase != "training":
            return f"the run is {self._phase.replace('_', ' ')}"
        oldest = self._experience.oldest_open()
        lease = self._experience.leases.open.get(oldest)
        if lease and lease.holder:
            return f"group {oldest} is being generated by {lease.holder}"
        entry = self._experience.replay.entries.get(oldest)
        if entry:
            holders = {scorer: offer.holder for scorer, offer in entry.offers.items()}
            waits = ", ".join(f"{scorer} ({holders.get(scorer, 'nobody')})" for scorer in sorted(entry.needs))
            return f"group {oldest} waits for {waits}"
        if not self._members.of_kind("rollout"):
            return "no rollout is here"
        versions = {r.name: r.version for r in self._members.of_kind("rollout")}
        return f"group {oldest} needs a rollout with version {self._experience.blocked_lease()}; there are {versions}"

    # --- what actors say ---------------------------------------------------------------------------------------------

    def _handle(self, identity: str, request: int, message: m.Message) -> None:
        newer = self._members.fenced_by(identity)
        if newer:
            self.exchange.send(identity, m.Fenced(by=newer), request)
            return
        if isinstance(message, m.Hello):
            self._on_hello(identity, request, message)
            return
        member = self._members.get(identity)
        if member is None:
            if not isinstance(message, m.Bye):
                self.exchange.send(identity, m.HelloNeeded())
            return
        member.heard_at = time.time()
        handler = self._handlers.get(type(message))
        if handler is None or member.kind not in SENDERS.get(type(message), {member.kind}):
            reason = f"{type(message).__name__} is not for a {member.kind} to say to the broker"
            refusal = m.Refused(code="not_allowed", reason=reason)
            self.exchange.send(identity, refusal, request)
            return
        try:
            handler(member, request, message)
        except (wire.WireError, ExperienceError, LedgerError) as error:
            log.warning("a message was refused", sender=identity, type=type(message).__name__, error=str(error))
            self.exchange.send(identity, m.Refused(code="bad_message", reason=str(error)), request)
        except StoreError:
            raise
        except Exception as error:  # no message, however odd, may end the broker
            log.exception("a message failed", sender=identity, type=type(message).__name__)
            self.exchange.send(identity, m.Refused(code="failed", reason=f"{type(error).__name__}: {error}"), request)

    def _on_hello(self, identity: str, request: int, hello: m.Hello) -> None:
        try:
            older = self._members.join(identity, hello, time.time())
        except MembershipError as error:
            self.exchange.send(identity, m.Refused(code="not_allowed", reason=str(error)), request)
            return
        if older and older.identity != identity:
            self._release(older)
            self.exchange.send(older.identity, m.Fenced(by=identity))
        # An incarnation that this broker has replaced without seeing it: what it held is free.
        for lease in list(self._experience.leases.open.values()):
            if lease.holder and lease.holder != identity and lease.holder.rpartition("#")[0] == hello.name:
                self._experience.leases.release(lease.holder)
        self._experience.leases.release(identity, but=set(hello.holding))
        self._experience.replay.withdraw(identity)
        self._evaluation.release(identity)
        if hello.kind == "trainer":
            self._on_trainer(hello)
        log.info("member joined", member=hello.name, kind=hello.kind, host=hello.host, pid=hello.pid)
        welcome = m.Welcome(run=self._settings.run, heartbeat_s=self._settings.broker.heartbeat_s)
        self.exchange.send(identity, welcome, request)
        if hello.kind in ("rollout", "trainer"):
            self._tell_trainer(self._receivers())

    def _on_trainer(self, hello: m.Hello) -> None:
        """A trainer that holds an older version than the last one committed redoes the steps in between. Without
        determinism that is another timeline: what rollouts hold of the old one is not leased to any more."""
        committed = self._experience.ledger.committed
        if hello.version < committed and not self._settings.deterministic:
            log.warning("redo", from_version=hello.version, to_version=committed)
            self._versions.abandon(hello.version)

    def _on_ledger_tail(self, member: Member, request: int, tail: m.LedgerTail) -> None:
        for row in tail.steps:
            self._experience.merge(row.step, row.groups, row.seed, row.digest)
        self.exchange.send(member.identity, m.Resumed(committed=self._experience.ledger.committed), request)

    def _on_heartbeat(self, member: Member, _request: int, beat: m.Heartbeat) -> None:
        member.gauges = beat.gauges
        holding, deadline = set(beat.holding), time.time() + self._settings.broker.lease_s
        self._experience.leases.renew(member.identity, holding, deadline)
        self._experience.replay.renew(member.identity, holding, deadline)
        self._evaluation.renew(member.identity, holding, deadline)
        self.exchange.send(member.identity, m.Pulse())

    def _on_bye(self, member: Member, _request: int, bye: m.Bye) -> None:
        self._members.leave(member.identity)
        log.info("member left", member=member.name, reason=bye.reason)
        self._release(member)
        self._tell_trainer(self._receivers())

    def _on_credit(self, member: Member, _request: int, credit: m.Credit) -> None:
        if credit.hello == member.hello:
            member.credit = max(member.credit, credit.total)

    def _on_finished(self, member: Member, request: int, finished: m.Finished) -> None:
        data = finished.experience.tobytes()
        group = unpack_group(data)
        if group.number != finished.number:
            raise ExperienceError(f"group {finished.number} came with the experience of group {group.number}")
        newest = max((int(t.versions.max()) for t in group.trajectories), default=0)
        if newest > max(self._versions.latest, self._experience.ledger.committed):
            raise ExperienceError(f"group {group.number} has tokens of version {newest}, which does not exist yet")
        if finished.number <= m.EVALUATION:
            versions = [int(v) for t in group.trajectories for v in t.versions if v >= 0]
            self._evaluation.finished(finished.number, data, (min(versions, default=-1), max(versions, default=-1)))
        elif len(group.trajectories) != self._settings.sampling.n:
            raise ExperienceError(
                f"group {group.number} has {len(group.trajectories)} trajectories, not {self._settings.sampling.n}"
            )
        elif self._experience.finish(finished.number, group.oldest_version() or 0):
            self._store.put_payload(finished.number, "experience", data)
            self._payloads[finished.number] = data
            self._totals["finished"] += 1
            self._totals["generated_tokens"] += group.sampled
        else:
            self._totals["late_answers"] += 1
            log.info("late answer", group=finished.number, sender=member.name)
        self.exchange.send(member.identity, m.Noted(), request)

    def _on_failed(self, member: Member, request: int, failed: m.Failed) -> None:
        if failed.number <= m.EVALUATION:
            self._evaluation_score(failed.number, 0.0)
        elif failed.number in self._experience.leases.open:
            self._experience.drop(failed.number, f"{member.name}: {failed.error}")
        self.exchange.send(member.identity, m.Noted(), request)

    def _on_scored(self, member: Member, request: int, scored: m.Scored) -> None:
        refused: list[str] = []
        for score in scored.scores:
            failures = [error for error in score.errors if error]
            self._totals["reward_errors"] += len(failures)
            if score.number <= m.EVALUATION:
                rewards = np.nan_to_num(score.rewards, nan=0.0)
                self._evaluation_score(score.number, float(rewards.mean()) if rewards.size else 0.0)
                continue
            if score.number not in self._experience.replay.entries:
                continue
            if len(score.rewards) != self._settings.sampling.n or np.isinf(score.rewards).any():
                refused.append(f"group {score.number}: {len(score.rewards)} rewards, or infinite ones")
                continue
            if np.isnan(score.rewards).sum() > len(score.rewards) - min(2, len(score.rewards)):
                self._drop(score.number, f"too few trajectories have a reward; {failures[-1] if failures else 'NaN'}")
            elif self._settings.replay.filter == "zero_variance" and np.nanstd(score.rewards) == 0:
                self._payloads.pop(score.number, None)
                self._experience.filter(score.number, "filtered: its rewards are all equal")
            elif self._experience.scored(score.number, "reward"):
                self._store.put_payload(score.number, "rewards", score.rewards.tobytes())
        self._note(member, request, refused)

    def _on_referenced(self, member: Member, request: int, referenced: m.Referenced) -> None:
        refused: list[str] = []
        for score in referenced.scores:
            if score.number not in self._experience.replay.entries:
                continue
            tokens = sum(len(t.tokens) for t in unpack_group(self._payload(score.number)).trajectories)
            if len(score.logprobs) != tokens or not np.isfinite(score.logprobs).all():
                refused.append(
                    f"group {score.number}: {len(score.logprobs)} finite log-probabilities for {tokens} tokens"
                )
            elif self._experience.scored(score.number, "reference"):
                self._store.put_payload(score.number, "reference", score.logprobs.tobytes())
        self._note(member, request, refused)

    def _note(self, member: Member, request: int, refused: list[str]) -> None:
        """What was good of a message is applied; what was not is named."""
        if refused:
            log.warning("scores were refused", sender=member.identity, errors=refused[:3])
        reply = m.Refused(code="bad_message", reason="; ".join(refused[:3])) if refused else m.Noted()
        self.exchange.send(member.identity, reply, request)

    def _on_take(self, member: Member, request: int, take: m.Take) -> None:
        since = self._take.since if self._take and self._take.identity == member.identity else time.time()
        self._take = _Waiting(member.identity, request, take.step, since)

    def _on_commit(self, member: Member, request: int, commit: m.Commit) -> None:
        first = self._experience.ledger.commit(commit.step, commit.digest)
        step = self._experience.ledger.taken(commit.step)
        assert step
        self._records.ledger({"step": step.step, "groups": step.groups, "seed": step.seed, "digest": step.digest})
        self._progress_at = time.time()
        if first:
            now = self._trained_until = time.time()
            self._totals["trained"] += len(step.groups)
            self._totals["trained_tokens"] += int(commit.metrics.get("tokens", 0))
            self._totals["tokens_lagging"] += int(commit.metrics.get("tokens_lagging", 0))
            self._totals["lag_max"] = max(self._totals["lag_max"], int(commit.metrics.get("lag_max", 0)))
            self._last_metrics = commit.metrics
            row = {"step": commit.step, "time": now, "train_s": now - (self._training_since or now)}
            row |= {**commit.metrics, **self._queues(), "groups_dropped": self._experience.drops}
            self._records.step(row | {"generated_tokens_total": self._totals["generated_tokens"]})
            every = self._settings.prompts.eval_every
            done = commit.step + 1
            due = every and done % every == 0 and done < self._settings.steps
            if due and self._evaluation.size and self._evaluation.round is None:
                self._evaluation.start(f"step {done}", done, exact=None)
        self.exchange.send(member.identity, m.Noted(), request)

    def _on_checkpointed(self, member: Member, request: int, checkpoint: m.Checkpointed) -> None:
        self._experience.free(checkpoint.version)
        if checkpoint.final:
            self._final_checkpoint = checkpoint.version
        log.info("checkpoint", version=checkpoint.version, path=checkpoint.path)
        self.exchange.send(member.identity, m.Noted(), request)

    def _on_publish(self, member: Member, request: int, publish: m.Publish) -> None:
        self._versions.publish(publish.version, publish.manifest.digest)
        offer = m.Offer(version=publish.version, manifest=publish.manifest, route=publish.route)
        for rollout in self._members.of_kind("rollout"):
            if rollout.identity in publish.targets:
                self.exchange.send(rollout.identity, offer)
        self.exchange.send(member.identity, m.Noted(), request)

    def _on_loaded(self, member: Member, request: int, loaded: m.Loaded) -> None:
        if loaded.digest != self._versions.digests.get(loaded.version):
            raise LedgerError(f"version {loaded.version} with digest {loaded.digest} was never published")
        member.version, member.digest = loaded.version, loaded.digest
        report = m.ReceiverReport(
            receiver=member.identity, version=loaded.version, digest=loaded.digest, pause_s=loaded.pause_s
        )
        self._tell_trainer(report)
        self._tell_trainer(self._receivers())
        self.exchange.send(member.identity, m.Noted(), request)

    def _on_load_failed(self, member: Member, request: int, failed: m.LoadFailed) -> None:
        log.warning("a version was not loaded", member=member.name, version=failed.version, error=failed.error)
        self._tell_trainer(m.ReceiverReport(receiver=member.identity, version=failed.version, error=failed.error))
        self.exchange.send(member.identity, m.Noted(), request)

    def _on_status(self, member: Member, request: int, _message: m.StatusRequest) -> None:
        self.exchange.send(member.identity, m.Status(state=self._state()), request)

    def _on_ledger(self, member: Member, request: int, _message: m.LedgerRequest) -> None:
        experience = self._experience
        taken = [n for step in experience.ledger.steps if step.digest is None for n in step.groups]
        reply = m.LedgerReply(steps=experience.ledger.committed, untrained=sorted([*experience.replay.entries, *taken]))
        self.exchange.send(member.identity, reply, request)

    def _on_stop_run(self, member: Member, request: int, stop: m.StopRun) -> None:
        self._observed_end = self._observed_end or stop.seen
        self.stop(stop.reason)
        self.exchange.send(member.identity, m.Noted(), request)

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _lost(self, member: Member) -> None:
        self._release(member)
        self._tell_trainer(self._receivers())

    def _release(self, member: Member) -> None:
        """What ``member`` held is free again."""
        released = [lease.number for lease in self._experience.leases.release(member.identity)]
        if released:
            log.info("leases released", groups=released, holder=member.name)
        self._experience.replay.withdraw(member.identity)
        self._evaluation.release(member.identity)
        if self._take and self._take.identity == member.identity:
            self._take = None

    def _current(self, rollout: Member) -> bool:
        """It serves a version of the present timeline."""
        return self._versions.serves(rollout.version, rollout.digest)

    def _archive_step(self, step: Step) -> None:
        self._store.commit()
        assert step.digest is not None
        self._archive.append(self._read_batch(step), step.digest)

    def _drop(self, number: int, reason: str) -> None:
        self._payloads.pop(number, None)
        self._experience.drop(number, reason)

    def _payload(self, number: int) -> bytes:
        if number not in self._payloads:
            self._payloads[number] = self._store.payloads([number])[0]["experience"]
        return self._payloads[number]

    def _evaluation_score(self, number: int, reward: float) -> None:
        finished = self._evaluation.score(number, reward)
        if finished:
            self._record_evaluation(finished)

    def _record_evaluation(self, finished: Round) -> None:
        log.info("evaluated", label=finished.label, reward=finished.mean())
        versions = [v for group in finished.groups.values() for v in group.versions or ()]
        self._records.evaluation(
            {
                "step": finished.step,
                "label": finished.label,
                "reward": finished.mean(),
                "prompts": len(finished.groups),
                "version_min": min(versions, default=-1),
                "version_max": max(versions, default=-1),
                "time": time.time(),
            }
        )

    def _batch(self, step: Step) -> m.Batch:
        self._store.commit()  # durable before it is sent, and visible to the read below
        batch = self._read_batch(step)
        for number in step.groups:
            self._payloads.pop(number, None)
        if step.step % max(1, self._settings.steps // SAMPLED_STEPS) == 0:
            first: Group = unpack_group(batch.groups[0].experience.data)
            self._records.sample(step.step, first, [float(r) for r in batch.groups[0].rewards])
        return batch

    def _read_batch(self, step: Step) -> m.Batch:
        groups = []
        for number, parts in zip(step.groups, self._store.payloads(step.groups), strict=True):
            if "experience" not in parts:
                raise StoreError(f"the store has lost group {number} of step {step.step}: the step cannot be redone")
            reference = parts.get("reference")
            groups.append(
                m.TakenGroup(
                    number=number,
                    experience=as_bytes(parts["experience"]),
                    rewards=np.frombuffer(parts["rewards"], np.float32),
                    reference=None if reference is None else np.frombuffer(reference, np.float32),
                )
            )
        committed = self._experience.ledger.committed
        return m.Batch(step=step.step, seed=step.seed, groups=groups, committed=committed)

    def _step_seed(self, step: int) -> int:
        digest = hashlib.sha256(f"{self._settings.seed}/{step}".encode()).digest()
        return int.from_bytes(digest[:4], "little")

    def _tell_trainer(self, message: m.Message) -> None:
        for trainer in self._members.of_kind("trainer"):
            self.exchange.send(trainer.identity, message)

    def _receivers(self) -> m.Receivers:
        rollouts = self._members.of_kind("rollout")
        nothing = (-1, "")
        return m.Receivers(
            serves={r.identity: (r.version, r.digest) if self._current(r) else nothing for r in rollouts}
        )

    def _queues(self) -> dict[str, int]:
        entries = self._experience.replay.entries.values()
        return {
            "leased": sum(lease.holder is not None for lease in self._experience.leases.open.values()),
            "waiting": sum(lease.holder is None for lease in self._experience.leases.open.values()),
            "unscored": sum(bool(entry.needs) for entry in entries),
            "ready": sum(not entry.needs for entry in entries),
        }

    def _state(self) -> dict[str, Any]:
        now = time.time()
        members = {
            member.name: {
                "kind": member.kind,
                "pid": member.pid,
                "host": member.host,
                "version": member.version,
                "silent_s": now - member.heard_at,
                **member.gauges,
            }
            for member in self._members
            if member.kind != "observer"
        }
        return {
            "run": self._settings.run,
            "pid": os.getpid(),
            "phase": self._phase,
            "error": self._error,
            "reason": self._stop_reason,
            "stall": self._stall,
            "step": self._experience.ledger.committed,
            "steps": self._settings.steps,
            "version": self._versions.latest,
            "max_lag": self._settings.gate.max_lag,
            "evaluations": dict(self._evaluation.results),
            "metrics": self._last_metrics,
            "queues": self._queues(),
            "members": members,
            "lost": dict(self._members.lost),
            "dropped": self._experience.drops,
            "totals": dict(self._totals),
            "train_s": (self._trained_until or now) - self._training_since if self._training_since else 0.0,
            "wall_s": now - self._started_at,
            "refused_messages": self.exchange.refused,
        }


def _sendable(prompt: Prompt) -> Prompt:
    """``prompt``, once it is known to survive the wire. Raises `WireError` where its truth holds what cannot."""
    wire.unpack(wire.pack(prompt.model_dump()))
    return prompt
