"""What each message does, and what it is answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import structlog

from penstock.protocols import messages as m
from penstock.protocols import wire
from penstock.protocols.experience import ExperienceError, unpack_group
from penstock.services.broker.membership import Member, MembershipError
from penstock.services.broker.rules.ledger import LedgerError
from penstock.services.broker.scheduler import Scheduler, Waiting
from penstock.services.broker.state import BrokerState
from penstock.services.broker.status import books, queues, state
from penstock.services.broker.store import StoreError

log = structlog.get_logger()

SENDERS: dict[type[m.Message], set[m.ActorKind]] = {
    m.Finished: {"rollout"},
    m.Failed: {"rollout"},
    m.Loaded: {"rollout"},
    m.LoadFailed: {"rollout"},
    m.Reach: {"rollout"},
    m.Scored: {"reward"},
    m.Referenced: {"reference"},
    m.LedgerTail: {"trainer"},
    m.Take: {"trainer"},
    m.Commit: {"trainer"},
    m.Checkpointed: {"trainer"},
    m.Invite: {"trainer"},
    m.Propose: {"trainer"},
    m.CommitVersion: {"trainer"},
    m.StopRun: {"observer"},
}
"""Who may say what; anything else is for every member."""


class Answers:
    """A handler for each message; answers leave with the turn."""

    def __init__(self, desk: BrokerState, dispatch: Scheduler) -> None:
        self._desk, self._dispatch = desk, dispatch
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
            m.Invite: self._on_relay,
            m.Propose: self._on_relay,
            m.CommitVersion: self._on_commit_version,
            m.Reach: self._on_report,
            m.Loaded: self._on_loaded,
            m.LoadFailed: self._on_report,
            m.StatusRequest: self._on_status,
            m.LedgerRequest: self._on_ledger,
            m.StopRun: self._on_stop_run,
        }

    def handle(self, identity: str, request: int, message: m.Message) -> None:
        """Whatever a peer says, it costs only itself; only a store that is gone for good ends the broker."""
        desk = self._desk
        newer = desk.members.fenced_by(identity)
        if newer:
            desk.exchange.send(identity, m.Fenced(by=newer), request)
            return
        if isinstance(message, m.Hello):
            self._on_hello(identity, request, message)
            return
        member = desk.members.get(identity)
        if member is None:
            if not isinstance(message, m.Bye):
                desk.exchange.send(identity, m.HelloNeeded())
            return
        member.heard_at = time.time()
        handler = self._handlers.get(type(message))
        if handler is None or member.kind not in SENDERS.get(type(message), {member.kind}):
            reason = f"{type(message).__name__} is not for a {member.kind} to say to the broker"
            refusal = m.Refused(code="not_allowed", reason=reason)
            desk.exchange.send(identity, refusal, request)
            return
        try:
            handler(member, request, message)
        except (wire.WireError, ExperienceError, LedgerError) as error:
            log.warning("a message was refused", sender=identity, type=type(message).__name__, error=str(error))
            desk.exchange.send(identity, m.Refused(code="bad_message", reason=str(error)), request)
        except StoreError:
            raise
        except Exception as error:  # no message, however odd, may end the broker
            log.exception("a message failed", sender=identity, type=type(message).__name__)
            desk.exchange.send(identity, m.Refused(code="failed", reason=f"{type(error).__name__}: {error}"), request)

    def _on_hello(self, identity: str, request: int, hello: m.Hello) -> None:
        desk = self._desk
        try:
            older = desk.members.join(identity, hello, time.time())
        except MembershipError as error:
            desk.exchange.send(identity, m.Refused(code="not_allowed", reason=str(error)), request)
            return
        if older and older.identity != identity:
            desk.release(older)
            desk.exchange.send(older.identity, m.Fenced(by=identity))
        # An incarnation that this broker has replaced without seeing it: what it held is free.
        for lease in list(desk.experience.leases.open.values()):
            if lease.holder and lease.holder != identity and lease.holder.rpartition("#")[0] == hello.name:
                desk.experience.leases.release(lease.holder)
        desk.experience.leases.release(identity, but=set(hello.holding))
        desk.experience.replay.withdraw(identity)
        desk.evaluation.release(identity)
        if hello.kind == "trainer":
            self._on_trainer(hello)
        log.info("member joined", member=hello.name, kind=hello.kind, host=hello.host, pid=hello.pid)
        welcome = m.Welcome(run=desk.settings.run, heartbeat_s=desk.settings.broker.heartbeat_s)
        desk.exchange.send(identity, welcome, request)
        if hello.kind in ("rollout", "trainer"):
            desk.tell_trainer(desk.receivers())

    def _on_trainer(self, hello: m.Hello) -> None:
        """A trainer that holds an older version than the last one committed redoes the steps in between. Without
        determinism that is another timeline: what rollouts hold of the old one is not leased to any more."""
        committed = self._desk.experience.ledger.committed
        self._desk.progress.redoing = hello.version < committed
        if hello.version < committed and not self._desk.settings.deterministic:
            log.warning("redo", from_version=hello.version, to_version=committed)
            self._desk.versions.abandon(hello.version)

    def _on_ledger_tail(self, member: Member, request: int, tail: m.LedgerTail) -> None:
        for row in tail.steps:
            self._desk.experience.merge(row.step, row.groups, row.seed, row.digest)
        self._desk.exchange.send(member.identity, m.Resumed(committed=self._desk.experience.ledger.committed), request)

    def _on_heartbeat(self, member: Member, _request: int, beat: m.Heartbeat) -> None:
        desk = self._desk
        member.gauges = beat.gauges
        holding, deadline = set(beat.holding), time.time() + desk.settings.broker.lease_s
        desk.experience.leases.renew(member.identity, holding, deadline)
        desk.experience.replay.renew(member.identity, holding, deadline)
        desk.evaluation.renew(member.identity, holding, deadline)
        desk.exchange.send(member.identity, m.HeartbeatAck())

    def _on_bye(self, member: Member, _request: int, bye: m.Bye) -> None:
        desk = self._desk
        desk.members.leave(member.identity)
        log.info("member left", member=member.name, reason=bye.reason)
        desk.release(member)
        desk.tell_trainer(desk.receivers())

    def _on_credit(self, member: Member, _request: int, credit: m.Credit) -> None:
        if credit.hello == member.hello:
            member.credit = max(member.credit, credit.total)

    def _on_finished(self, member: Member, request: int, finished: m.Finished) -> None:
        desk, progress = self._desk, self._desk.progress
        data = finished.experience.tobytes()
        group = unpack_group(data)
        if group.number != finished.number:
            raise ExperienceError(f"group {finished.number} came with the experience of group {group.number}")
        newest = max((int(t.versions.max()) for t in group.trajectories), default=0)
        if newest > max(desk.versions.latest, desk.experience.ledger.committed):
            raise ExperienceError(f"group {group.number} has tokens of version {newest}, which does not exist yet")
        if finished.number <= m.EVALUATION:
            versions = [int(v) for t in group.trajectories for v in t.versions if v >= 0]
            desk.evaluation.finished(finished.number, data, (min(versions, default=-1), max(versions, default=-1)))
        elif len(group.trajectories) != desk.settings.sampling.n:
            raise ExperienceError(
                f"group {group.number} has {len(group.trajectories)} trajectories, not {desk.settings.sampling.n}"
            )
        elif desk.experience.finish(finished.number, group.oldest_version() or 0):
            desk.store.put_payload(finished.number, "experience", data)
            desk.payloads[finished.number] = data
            progress.totals["finished"] += 1
            progress.totals["generated_tokens"] += group.sampled
        else:
            progress.totals["late_answers"] += 1
            log.info("late answer", group=finished.number, sender=member.name)
        desk.exchange.send(member.identity, m.Ack(), request)

    def _on_failed(self, member: Member, request: int, failed: m.Failed) -> None:
        desk = self._desk
        if failed.number <= m.EVALUATION:
            desk.score_evaluation(failed.number, 0.0)
        elif failed.number in desk.experience.leases.open:
            desk.experience.drop(failed.number, f"{member.name}: {failed.error}")
        desk.exchange.send(member.identity, m.Ack(), request)

    def _on_scored(self, member: Member, request: int, scored: m.Scored) -> None:
        desk = self._desk
        refused: list[str] = []
        for score in scored.scores:
            failures = [error for error in score.errors if error]
            desk.progress.totals["reward_errors"] += len(failures)
            if score.number <= m.EVALUATION:
                rewards = np.nan_to_num(score.rewards, nan=0.0)
                desk.score_evaluation(score.number, float(rewards.mean()) if rewards.size else 0.0)
                continue
            if score.number not in desk.experience.replay.entries:
                continue
            if len(score.rewards) != desk.settings.sampling.n or np.isinf(score.rewards).any():
                refused.append(f"group {score.number}: {len(score.rewards)} rewards, or infinite ones")
                continue
            if np.isnan(score.rewards).sum() > len(score.rewards) - min(2, len(score.rewards)):
                desk.drop(score.number, f"too few trajectories have a reward; {failures[-1] if failures else 'NaN'}")
            elif desk.settings.replay.filter == "zero_variance" and np.nanstd(score.rewards) == 0:
                desk.payloads.pop(score.number, None)
                desk.experience.filter(score.number, "filtered: its rewards are all equal")
            elif desk.experience.scored(score.number, "reward"):
                desk.store.put_payload(score.number, "rewards", score.rewards.tobytes())
        desk.note(member, request, refused)

    def _on_referenced(self, member: Member, request: int, referenced: m.Referenced) -> None:
        desk = self._desk
        refused: list[str] = []
        for score in referenced.scores:
            if score.number not in desk.experience.replay.entries:
                continue
            tokens = sum(len(t.tokens) for t in unpack_group(desk.payload(score.number)).trajectories)
            if len(score.logprobs) != tokens or not np.isfinite(score.logprobs).all():
                refused.append(
                    f"group {score.number}: {len(score.logprobs)} finite log-probabilities for {tokens} tokens"
                )
            elif desk.experience.scored(score.number, "reference"):
                desk.store.put_payload(score.number, "reference", score.logprobs.tobytes())
        desk.note(member, request, refused)

    def _on_take(self, member: Member, request: int, take: m.Take) -> None:
        since = (
            self._dispatch.waiting.since
            if self._dispatch.waiting and self._dispatch.waiting.identity == member.identity
            else time.time()
        )
        self._dispatch.waiting = Waiting(member.identity, request, take.step, since)

    def _on_commit(self, member: Member, request: int, commit: m.Commit) -> None:
        desk, progress = self._desk, self._desk.progress
        first = desk.experience.ledger.commit(commit.step, commit.digest)
        step = desk.experience.ledger.taken(commit.step)
        assert step
        desk.records.ledger({"step": step.step, "groups": step.groups, "seed": step.seed, "digest": step.digest})
        progress.at = time.time()
        if first:
            now = progress.trained_until = time.time()
            progress.totals["trained"] += len(step.groups)
            progress.totals["trained_tokens"] += int(commit.metrics.get("tokens", 0))
            progress.totals["tokens_lagging"] += int(commit.metrics.get("tokens_lagging", 0))
            progress.totals["lag_max"] = max(progress.totals["lag_max"], int(commit.metrics.get("lag_max", 0)))
            progress.last_metrics = commit.metrics
            row = {"step": commit.step, "time": now, "train_s": now - (progress.training_since or now)}
            row |= {**commit.metrics, **queues(desk), "groups_dropped": desk.experience.drops}
            desk.records.step(row | {"generated_tokens_total": progress.totals["generated_tokens"]})
            every = desk.settings.prompts.eval_every
            done = commit.step + 1
            due = every and done % every == 0 and done < desk.settings.steps
            if due and desk.evaluation.size and desk.evaluation.round is None:
                desk.evaluation.start(f"step {done}", done, exact=None)
        desk.exchange.send(member.identity, m.Ack(), request)

    def _on_checkpointed(self, member: Member, request: int, checkpoint: m.Checkpointed) -> None:
        self._desk.experience.free(checkpoint.version)
        if checkpoint.final:
            self._desk.progress.final_checkpoint = checkpoint.version
        log.info("checkpoint", version=checkpoint.version, path=checkpoint.path)
        self._desk.exchange.send(member.identity, m.Ack(), request)

    def _on_relay(self, member: Member, request: int, message: m.Invite | m.Propose | m.CommitVersion) -> None:
        """What the trainer says to rollouts."""
        desk = self._desk
        here = {rollout.identity for rollout in desk.members.of_kind("rollout")}
        for target in message.targets:
            if target in here:
                desk.exchange.send(target, message)
        absent = [target for target in message.targets if target not in here]
        desk.exchange.send(member.identity, m.Relayed(absent=absent), request)

    def _on_report(self, member: Member, request: int, report: m.Reach | m.LoadFailed) -> None:
        """What a rollout says to the trainer."""
        if isinstance(report, m.LoadFailed):
            log.warning("a version was not loaded", member=member.name, version=report.version, error=report.error)
        self._desk.tell_trainer(report.model_copy(update={"receiver": member.identity}))
        self._desk.exchange.send(member.identity, m.Ack(), request)

    def _on_commit_version(self, member: Member, request: int, commit: m.CommitVersion) -> None:
        desk = self._desk
        desk.versions.publish(commit.version, commit.digests.whole)
        if commit.cost:
            desk.progress.publish_cost = commit.version, commit.cost
        self._on_relay(member, request, commit)

    def _on_loaded(self, member: Member, request: int, loaded: m.Loaded) -> None:
        desk = self._desk
        if loaded.digest != desk.versions.digests.get(loaded.version):
            raise LedgerError(f"version {loaded.version} with digest {loaded.digest} was never published")
        member.version, member.digest = loaded.version, loaded.digest
        self._record_load(member, loaded)
        desk.tell_trainer(loaded.model_copy(update={"receiver": member.identity}))
        desk.tell_trainer(desk.receivers())
        desk.exchange.send(member.identity, m.Ack(), request)

    def _record_load(self, member: Member, loaded: m.Loaded) -> None:
        progress = self._desk.progress
        progress.pauses[member.name] = loaded.pause_s
        row = {"time": time.time(), "receiver": member.name, **loaded.model_dump(exclude={"receiver"})}
        version, cost = progress.publish_cost
        if cost and version == loaded.version:
            row |= cost.model_dump()
        self._desk.records.load(row)

    def _on_status(self, member: Member, request: int, _message: m.StatusRequest) -> None:
        self._desk.exchange.send(member.identity, m.Status(state=state(self._desk)), request)

    def _on_ledger(self, member: Member, request: int, _message: m.LedgerRequest) -> None:
        self._desk.exchange.send(member.identity, books(self._desk), request)

    def _on_stop_run(self, member: Member, request: int, stop: m.StopRun) -> None:
        desk, progress = self._desk, self._desk.progress
        progress.observed_end = progress.observed_end or stop.seen
        progress.stop(stop.reason)
        desk.exchange.send(member.identity, m.Ack(), request)
