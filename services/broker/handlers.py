"""What each message does, and what it is answered."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog

from penstock.protocols import messages as m
from penstock.protocols import wire
from penstock.protocols.columns import ColumnError
from penstock.protocols.experience import ExperienceError, Purpose
from penstock.protocols.packed_groups import source_in
from penstock.protocols.router_server import reason_of
from penstock.services.broker import best_version, clock, held_out_loss, offers, scoring
from penstock.services.broker.agents import AgentDesk, NotHeldError
from penstock.services.broker.membership import Member, MembershipError
from penstock.services.broker.rules.ledger import LedgerError, Step
from penstock.services.broker.scheduler import Scheduler, Waiting
from penstock.services.broker.senders import GENERATOR, LEARNER, SENDERS
from penstock.services.broker.state import BrokerState
from penstock.services.broker.status import ledger_state, live_state, queues
from penstock.services.broker.store import StoreError

log = structlog.get_logger()

MOST_COUNTED = 1 << 53
"""What is more is no count."""


class Handlers:
    """One for each message; answers leave with the turn."""

    def __init__(self, state: BrokerState, scheduler: Scheduler, desk: AgentDesk) -> None:
        self._state, self._scheduler = state, scheduler
        self._handlers: dict[type[m.Message], Callable[[Member, int, Any], None]] = {
            m.Heartbeat: self._on_heartbeat,
            m.Bye: self._on_bye,
            m.Credit: self._on_credit,
            m.Finished: self._on_finished,
            m.Failed: self._on_failed,
            m.Scores: self._on_scores,
            m.LedgerTail: self._on_ledger_tail,
            m.Take: self._on_take,
            m.HeldOutRequest: partial(held_out_loss.send_rows, state),
            m.EvalLoss: partial(held_out_loss.take, state),
            m.StepColumn: self._on_step_column,
            m.Learned: self._on_learned,
            m.Commit: self._on_commit,
            m.Checkpointed: self._on_checkpointed,
            m.Invite: self._on_relay,
            m.Propose: self._on_relay,
            m.CommitVersion: self._on_commit_version,
            m.Published: self._on_published,
            m.Reach: self._on_report,
            m.Loaded: self._on_loaded,
            m.LoadFailed: self._on_report,
            m.StatusRequest: self._on_status,
            m.LedgerRequest: self._on_ledger,
            m.StopRun: self._on_stop_run,
            m.TurnRequest: desk.on_turn,
            m.Note: desk.on_note,
            m.GiveBack: desk.on_give_back,
            m.Generated: desk.on_generated,
        }

    def handle(self, identity: str, request: int, message: m.Message) -> None:
        """Whatever a peer says, it costs only itself; only a store that is gone for good ends the broker."""
        state = self._state
        newer = state.members.fenced_by(identity)
        if newer:
            state.router.send(identity, m.Fenced(by=newer), request)
            return
        if isinstance(message, m.Hello):
            self._on_hello(identity, request, message)
            return
        member = state.members.get(identity)
        if member is None:
            if not isinstance(message, m.Bye):
                state.router.send(identity, m.HelloNeeded())
            return
        member.heard_at = clock.now()
        handler = self._handlers.get(type(message))
        if handler is None or not self._may_say(member, type(message)):
            reason = f"{type(message).__name__} is not for a {member.kind} to say to the broker"
            state.router.send(identity, m.Refused(code="not_allowed", reason=reason), request)
            return
        try:
            handler(member, request, message)
        except (wire.WireError, ExperienceError, ColumnError, LedgerError) as error:
            reason = reason_of(error)
            log.warning("a message was refused", sender=identity, type=type(message).__name__, error=reason)
            state.router.send(identity, m.Refused(code="bad_message", reason=reason), request)
        except NotHeldError as error:
            reason = reason_of(error)
            log.warning("a group is another's", sender=identity, type=type(message).__name__, error=reason)
            state.router.send(identity, m.Refused(code="not_held", reason=reason), request)
        except StoreError:
            raise
        except Exception as error:  # no message, however odd, may end the broker
            log.exception("a message failed", sender=identity, type=type(message).__name__)
            reason = reason_of(f"{type(error).__name__}: {error}")
            state.router.send(identity, m.Refused(code="failed", reason=reason), request)

    def _may_say(self, member: Member, kind: type[m.Message]) -> bool:
        wanted = SENDERS.get(kind, member.kind)
        if wanted == GENERATOR:
            wanted = "gateway" if self._state.settings.agents else "rollout"
        return member.kind == wanted or (wanted == LEARNER and member.kind in self._state.settings.learners)

    def _ack(self, member: Member, request: int) -> None:
        self._state.router.send(member.identity, m.Ack(), request)

    # --- life --------------------------------------------------------------------------------------------------------

    def _on_hello(self, identity: str, request: int, hello: m.Hello) -> None:
        state = self._state
        kinds = {"rollout", "observer", *state.settings.learners, *state.scorers}
        if state.settings.agents:
            kinds.add("gateway")
        try:
            older = state.members.join(identity, hello, clock.now(), kinds, state.settings.learners)
        except MembershipError as error:
            state.router.send(identity, m.Refused(code="not_allowed", reason=reason_of(error)), request)
            return
        if older and older.identity != identity:
            state.release(older.identity)
            state.router.send(older.identity, m.Fenced(by=identity))
        for purpose in ("train", "eval", "turn"):
            holding = set(hello.holding.get(purpose, ()))
            for holds in state.holds(purpose):
                # An incarnation that this broker has replaced without seeing it: what it held is free.
                for holder in [h for h in holds.holders() if h.rpartition("#")[0] == hello.name and h != identity]:
                    holds.release(holder)
                holds.release(identity, holding)
        if hello.kind == "trainer" and not (older and older.identity == identity):  # else it is between two words
            self._on_trainer(hello)
        log.info("member joined", member=hello.name, kind=hello.kind, host=hello.host, pid=hello.pid)
        welcome = m.Welcome(run=state.settings.run, heartbeat_s=state.settings.broker.heartbeat_s)
        state.router.send(identity, welcome, request)
        if older and older.identity == identity and (member := state.members.get(identity)):
            offers.say_again(state, older, member)
        if hello.kind in ("rollout", "trainer"):
            state.receivers_changed = True

    def _on_trainer(self, hello: m.Hello) -> None:
        """A trainer that holds an older version than the last one committed redoes the steps in between. Without
        determinism that is another timeline: what rollouts hold of the old one is not leased to any more."""
        committed = self._state.groups.ledger.committed
        self._state.progress.redoing = hello.version < committed
        if hello.version < committed and not self._state.settings.deterministic:
            log.warning("redo", from_version=hello.version, to_version=committed)
            self._state.versions.abandon(hello.version)

    def _on_heartbeat(self, member: Member, _request: int, beat: m.Heartbeat) -> None:
        state = self._state
        member.gauges = {name: value for name, value in beat.gauges.items() if math.isfinite(value)}
        if member.kind in state.scorers:
            state.progress.scorer_gauges[member.name] = member.gauges
        deadline = clock.now() + state.settings.broker.lease_s
        for purpose, numbers in beat.holding.items():
            for holds in state.holds(purpose):
                holds.renew(member.identity, set(numbers), deadline)
        state.router.send(member.identity, m.HeartbeatAck())

    def _on_bye(self, member: Member, _request: int, bye: m.Bye) -> None:
        self._state.members.leave(member.identity)
        log.info("member left", member=member.name, reason=bye.reason)
        self._state.left(member)

    def _on_credit(self, member: Member, _request: int, credit: m.Credit) -> None:
        if credit.hello == member.hello:
            member.credit = max(member.credit, credit.total)

    # --- experience --------------------------------------------------------------------------------------------------

    def _on_finished(self, member: Member, request: int, finished: m.Finished) -> None:
        """The payload is not decoded here, but for its source, where that matters: whoever scores it checks every rule,
        and that the summary is true."""
        state, said = self._state, finished.summary
        number, key = finished.number, (finished.purpose, finished.number)
        if said.newest > max(state.versions.latest, state.groups.ledger.committed):
            raise ExperienceError(f"group {number} has tokens of version {said.newest}, which does not exist yet")
        lease = state.evaluation.leases.open.get(number) if finished.purpose == "eval" else None
        n = state.sampling("eval", lease.draw).n if lease else state.settings.sampling.trajectories
        if finished.purpose == "eval" and lease is None:
            self._ack(member, request)  # it is answered, or its round is over
            return
        if said.trajectories != n and not (state.settings.agents and said.trajectories > n):  # sessions may branch
            raise ExperienceError(f"group {number} has {said.trajectories} trajectories, not {n}")
        # Not of the data's row: what the columns of a step are held against is the experience, and a row may be gone.
        source = source_in(finished.experience) if state.settings.columns.by_source else ""
        if lease:
            source = source or state.held_out.name_of(lease.draw)
        # A resumed run may ask others than when it was leased.
        if not state.settings.columns.judged(source, finished.purpose == "eval"):
            self._unusable(finished.purpose, number, scoring.unjudged(source))
        elif lease:
            if state.progress.phase.startswith("evaluating"):
                state.progress.at = clock.now()
            if state.evaluation.finish(number, said.oldest, said.newest, said.trajectories, said.tokens, source):
                state.payloads.begin(key, finished.experience.tobytes())
        elif state.groups.finish(number, said.oldest, said.trajectories, said.tokens, source):
            state.payloads.begin(key, finished.experience.tobytes())
            state.progress.totals["finished"] += 1
            state.progress.totals["generated_tokens"] += said.sampled - said.given
            if not state.groups.replay.entries[number].needs:  # nobody scores it, so that it is sound as it is
                state.groups.keep()
            state.traces.finished(number, member.name, said)
        else:
            state.progress.totals["late_answers"] += 1
            log.info("late answer", group=number, sender=member.name)
        state.sessions_ended(finished.purpose, number)
        self._ack(member, request)

    def _on_failed(self, member: Member, request: int, failed: m.Failed) -> None:
        self._unusable(failed.purpose, failed.number, f"{member.name}: {failed.error}")
        self._ack(member, request)

    def _unusable(self, purpose: Purpose, number: int, reason: str) -> None:
        """The prompt of a group that somebody generates."""
        if purpose == "eval" or number in self._state.groups.leases.open:
            self._state.drop_any(purpose, number, reason, "prompt")

    def _on_scores(self, member: Member, request: int, scores: m.Scores) -> None:
        column = self._state.settings.columns.by_name.get(scores.column)
        if column is None or column.scorer != member.kind:
            raise ColumnError(f"{scores.column!r} is no column that a {member.kind} of this run writes")
        refused = []
        for score in scores.scores:
            try:
                scoring.take_score(self._state, column, score, member.identity)
            except ColumnError as error:  # what is good of a message is applied; what is not is named
                refused.append(f"group {score.number}: {error}")
        if refused:
            log.warning("scores were refused", sender=member.identity, errors=refused[:3])
            raise ColumnError("; ".join(refused[:3]))
        self._ack(member, request)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _on_ledger_tail(self, member: Member, request: int, tail: m.LedgerTail) -> None:
        groups = self._state.groups
        groups.merge(tail.steps)
        self._state.router.send(member.identity, m.Resumed(committed=groups.ledger.committed), request)

    def _on_take(self, member: Member, request: int, take: m.Take) -> None:
        ledger = self._state.groups.ledger
        before = ledger.taken(take.step - 1) if ledger.length > take.step - 1 >= ledger.first else None
        if take.after and before and before.groups != take.after and (before.digest or before.columns):
            raise LedgerError(
                f"step {take.step - 1} has other groups than this {member.kind} was given: start it again"
            )
        waiting = self._scheduler.waiting.get(member.kind)
        since = waiting.since if waiting and waiting.identity == member.identity else clock.now()
        self._scheduler.waiting[member.kind] = Waiting(member.identity, request, take.step, since)

    def _on_step_column(self, member: Member, request: int, said: m.StepColumn) -> None:
        """All of it in one turn: a step has a column whole, or not."""
        state, ledger = self._state, self._state.groups.ledger
        column = state.settings.columns.by_name.get(said.column)
        if column is None or not column.of_step or column.scorer != member.kind:
            raise ColumnError(f"{said.column!r} is no column of steps that a {member.kind} of this run writes")
        step = ledger.taken(said.step)
        if step is None:
            raise LedgerError(f"step {said.step} was never taken")
        if said.column not in step.columns:
            if len(said.values) != len(step.groups):
                raise ColumnError(f"step {said.step} has {len(step.groups)} groups, not {len(said.values)}")
            for values in said.values:
                column.check_values(values)
            for number, values in zip(step.groups, said.values, strict=True):
                state.payloads.add(("train", number), column.name, values)
            ledger.describe(said.step, column.name)
        self._ack(member, request)

    def _on_learned(self, member: Member, request: int, learned: m.Learned) -> None:
        """Nobody waits for it: what the next step needs of a learner are its columns."""
        self._state.progress.learned, member.version = learned.metrics, learned.step + 1
        row = {"step": learned.step, "time": time.time(), "digest": learned.digest, **learned.metrics}
        self._state.recorder.learned(member.kind, row)
        self._ack(member, request)

    def _on_commit(self, member: Member, request: int, commit: m.Commit) -> None:
        """Ledger, version and what the rollouts are told leave in one turn: nobody sees one without the others."""
        state = self._state
        first = state.groups.ledger.commit(commit.step, commit.groups, commit.digest)
        step = state.groups.ledger.taken(commit.step)
        assert step
        state.recorder.ledger({name: getattr(step, name) for name in ("step", "groups", "seed", "max_lag", "digest")})
        state.progress.at = clock.now()
        if first:
            self._record_step(commit, step)
        absent = self._publish(commit.version) if commit.version else []
        state.progress.committing = commit.step
        state.router.send(member.identity, m.Relayed(absent=absent), request)

    def _record_step(self, commit: m.Commit, step: Step) -> None:
        state, progress, metrics = self._state, self._state.progress, commit.metrics
        now = progress.trained_until = clock.now()
        state.traces.trained(step)
        progress.totals["trained"] += len(step.groups)
        counts = {name: int(value) for name, value in metrics.items() if abs(value) < MOST_COUNTED}  # and not NaN
        progress.totals["trained_tokens"] += counts.get("tokens", 0)
        progress.totals["tokens_lagging"] += counts.get("tokens_lagging", 0)
        progress.totals["steps_skipped"] += counts.get("skipped", 0)
        progress.totals["groups_without_variance"] += counts.get("groups_without_variance", 0)
        progress.totals["lag_max"] = max(progress.totals["lag_max"], counts.get("lag_max", 0))
        progress.last_metrics = metrics
        row = {
            "step": commit.step,
            "time": now,
            "max_lag": step.max_lag,
            "train_s": now - (progress.training_since or now),
            **progress.learned,
            **metrics,
        }
        row |= {**queues(state), **progress.latency.read(), **state.curriculum.counts()}
        row |= {"groups_dropped": state.groups.drops}
        row |= {f"filtered/{why}": count for why, count in state.groups.filtered.items()}
        state.recorder.step(row | {"generated_tokens_total": progress.totals["generated_tokens"]})
        every, done = state.settings.prompts.eval_every, commit.step + 1
        due = every and done % every == 0 and done < state.groups.steps
        if due and state.evaluation.size and state.evaluation.round is None:
            state.evaluation.start(f"step {done}", done, exact=None)
        elif due and state.evaluation.size:
            progress.totals["eval_left_out"] += 1
            log.warning("an evaluation is left out: the one before is under way", step=done)

    def _on_checkpointed(self, member: Member, request: int, checkpoint: m.Checkpointed) -> None:
        progress, kind = self._state.progress, member.kind
        progress.checkpoints[kind], progress.then_failed[kind] = checkpoint.version, checkpoint.then_failed
        if checkpoint.final:
            progress.final_checkpoints[kind] = checkpoint.version
        log.info("checkpoint", learner=kind, version=checkpoint.version, path=checkpoint.path)
        self._state.router.send(member.identity, m.Keep(versions=best_version.worth_keeping(self._state)), request)

    # --- weights -----------------------------------------------------------------------------------------------------

    def _on_relay(self, member: Member, request: int, message: m.Invite | m.Propose) -> None:
        self._state.router.send(member.identity, m.Relayed(absent=offers.relay(self._state, message)), request)

    def _on_commit_version(self, member: Member, request: int, commit: m.CommitVersion) -> None:
        """A version that no step yields now: the first one, and what a late rollout is seeded with."""
        self._state.router.send(member.identity, m.Relayed(absent=self._publish(commit)), request)

    def _publish(self, commit: m.CommitVersion) -> list[str]:
        self._state.versions.publish(commit.version, commit.digests.whole)
        return offers.relay(self._state, commit)

    def _on_published(self, _member: Member, _request: int, published: m.Published) -> None:
        self._state.progress.publish_cost = published.version, published.cost

    def _on_report(self, member: Member, request: int, report: m.Reach | m.LoadFailed) -> None:
        """What a rollout says to the trainer."""
        if isinstance(report, m.LoadFailed):
            offers.answered(member, report)
            log.warning("a version was not loaded", member=member.name, version=report.version, error=report.error)
        self._state.tell_trainer(report.model_copy(update={"receiver": member.identity}))
        self._ack(member, request)

    def _on_loaded(self, member: Member, request: int, loaded: m.Loaded) -> None:
        state = self._state
        if loaded.digest != state.versions.digests.get(loaded.version):
            raise LedgerError(f"version {loaded.version} with digest {loaded.digest} was never published")
        member.version, member.digest = loaded.version, loaded.digest
        offers.answered(member, loaded)
        self._record_load(member, loaded)
        state.tell_trainer(loaded.model_copy(update={"receiver": member.identity}))
        state.receivers_changed = True
        self._ack(member, request)

    def _record_load(self, member: Member, loaded: m.Loaded) -> None:
        progress = self._state.progress
        progress.pauses[member.name] = loaded.pause_s
        row = {"time": time.time(), "receiver": member.name, **loaded.model_dump(exclude={"receiver"})}
        version, cost = progress.publish_cost
        if cost and version == loaded.version:
            row |= cost.model_dump()
        self._state.recorder.load(row)

    # --- observers ---------------------------------------------------------------------------------------------------

    def _on_status(self, member: Member, request: int, asked: m.StatusRequest) -> None:
        self._state.router.send(member.identity, m.Status(state=live_state(self._state, asked.whole)), request)

    def _on_ledger(self, member: Member, request: int, _message: m.LedgerRequest) -> None:
        self._state.router.send(member.identity, ledger_state(self._state), request)

    def _on_stop_run(self, member: Member, request: int, stop: m.StopRun) -> None:
        progress = self._state.progress
        progress.observed_end = progress.observed_end or stop.seen
        if stop.failed and not progress.stop_reason:
            progress.error = stop.reason
        progress.stop(stop.reason)
        self._ack(member, request)
