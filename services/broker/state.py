"""What the broker's rooms share: groups, members, versions, the store, and how far the run has come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from penstock.protocols import messages as m
from penstock.protocols.columns import Column, ColumnTable
from penstock.protocols.experience import Purpose, Sampling, as_bytes
from penstock.protocols.keys import BrokerKeys
from penstock.protocols.router_server import RouterServer
from penstock.services.broker import best_version, clock
from penstock.services.broker.archive import Archive
from penstock.services.broker.config import (
    BrokerConfig,
    EvalSampling,
    GateConfig,
    PromptsConfig,
    ReplayConfig,
    StoreConfig,
)
from penstock.services.broker.latency import Latency
from penstock.services.broker.meanwhile import Meanwhile
from penstock.services.broker.membership import Member, Members
from penstock.services.broker.payloads import Payloads
from penstock.services.broker.prometheus import Exporter
from penstock.services.broker.recorder import Recorder
from penstock.services.broker.records import Records
from penstock.services.broker.rules.curriculum import Bounds, Curriculum
from penstock.services.broker.rules.evaluation import Evaluation
from penstock.services.broker.rules.gate import Gate
from penstock.services.broker.rules.groups import DropKind, GroupTracker
from penstock.services.broker.rules.held_out_losses import HeldOutLosses
from penstock.services.broker.rules.holds import Holds
from penstock.services.broker.rules.leases import Lease
from penstock.services.broker.rules.ledger import Step
from penstock.services.broker.rules.turns import Turns
from penstock.services.broker.store import Store
from penstock.services.broker.tally import Tally
from penstock.services.broker.traces import Traces
from penstock.services.broker.trackers import Trackers
from penstock.services.broker.versions import Versions
from penstock.services.data import open_source
from penstock.services.data.held_out import HeldOut
from penstock.services.data.prompts import PromptStream
from penstock.services.runtime.plain import plain

log = structlog.get_logger()


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
    columns: ColumnTable
    """What a group needs before it may be trained on."""
    trackers: tuple[str, ...] = ()
    tracker_samples: int = 0
    """Answers of a step that they are shown."""
    prometheus: str | None = None
    """Where metrics are served; None: nowhere."""
    traces: str | None = None
    """The collector that traces of groups go to; None: there are none."""
    wanted: dict[str, int] = field(default_factory=dict)
    """How many actors of each kind the config asks for, for these metrics."""
    project: str = "penstock"
    """What trackers file the run under."""
    described: dict[str, Any] = field(default_factory=dict)
    """The resolved config, for trackers."""
    learners: tuple[str, ...] = ("trainer",)
    """Kinds of actors that train on every step; the trainer, which publishes, is one of them."""
    agents: bool = False
    """Groups are made by agents, through gateways; rollouts answer their turns."""
    without_engine: bool = False
    """Rollouts have no model: each serves whatever is newest, and is sent nothing."""
    deterministic: bool = False
    keys: BrokerKeys | None = None
    """Needed where ``broker.bind`` is not on the loopback."""
    store_key: str | None = None
    """The run's own key: a store with another is another run's."""


@dataclass(slots=True)
class Progress:
    """How far the run has come."""

    phase: m.Phase = "starting"
    started_at: float = field(default_factory=clock.now)
    training_since: float | None = None
    trained_until: float | None = None
    at: float = field(default_factory=clock.now)
    """When a step was committed last."""
    checkpoints: dict[str, int] = field(default_factory=dict)
    """Learner to the version of its newest durable checkpoint."""
    final_checkpoints: dict[str, int] = field(default_factory=dict)
    """Learner to the version of the checkpoint that ended the run for it."""
    then_failed: dict[str, str] = field(default_factory=dict)
    """Learner to what the command for each of its checkpoints could not do."""
    stop_reason: str | None = None
    early: str = ""
    """Why no more steps are taken, although the config asks for more."""
    measured_since: int = 0
    """So many evaluations were made before rewards were other ones: they are not compared with those that come."""
    error: str | None = None
    stall: str | None = None
    redoing: bool = False
    """The trainer came with an older version than the last one committed."""
    observed_end: bool = False
    """An observer has read all it wants."""
    learned: dict[str, float] = field(default_factory=dict)
    """What learners beside the trainer last said of a step."""
    last_metrics: dict[str, Any] = field(default_factory=dict)
    totals: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("leased", "finished", "trained", "generated_tokens", "trained_tokens", "late_answers", "lag_max",
             "tokens_lagging", "taken_up", "eval_unusable", "eval_left_out", "prompts_dropped", "steps_skipped",
             "groups_without_variance"), 0
        )
    )  # fmt: skip

    committing: int | None = None
    """The step that a commit of this turn is about."""
    publish_cost: tuple[int, m.PublishCost | None] = (-1, None)
    """The version published last, and what that took in the trainer."""
    pauses: dict[str, float] = field(default_factory=dict)
    """Rollout to how long it last stood still for a new version, in seconds."""
    tallies: dict[str, Tally] = field(default_factory=dict)
    """By column: calls of a reward function, and how they failed."""
    scorer_gauges: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of every scorer's process, the last ones, also when it has left."""
    latency: Latency = field(default_factory=Latency)
    """Of scoring, since the last step."""

    def stop(self, reason: str) -> None:
        """Ends the run; safe from a signal handler."""
        self.stop_reason = self.stop_reason or reason


class BrokerState:
    """See the module's docstring. Used from the broker's one thread."""

    def __init__(self, settings: BrokerSettings, store_url: str) -> None:
        self.settings = settings
        self.progress = Progress()
        self.recorder = Recorder(
            settings.folder,
            Trackers(settings.trackers, settings.folder, settings.project, settings.described),
        )
        self.exporter = (
            Exporter(settings.prometheus, settings.folder, settings.run, settings.wanted, settings.broker.advertise)
            if settings.prometheus
            else None
        )
        self.traces = Traces(settings.traces, settings.run)
        self.archive = Archive(settings.folder, settings.replay.archive)
        # What can fail stands before the store, which the newest broker has for itself: one that cannot even listen
        # ends none that can.
        self.router = RouterServer(settings.broker.bind, settings.keys)
        self.meanwhile = Meanwhile(self.router)
        try:
            self.prompts, self.held_out, self.held_out_given = self.meanwhile.until(self._read_prompts)
            self._open(Store(store_url, settings.run, settings.store, settings.store_key, self.meanwhile))
        except BaseException:
            self.router.close()
            raise

    def _read_prompts(self) -> tuple[PromptStream, HeldOut, HeldOut]:
        """Of large files, for minutes."""
        settings = self.settings.prompts
        stream = open_source(settings.train)
        prompts = PromptStream(stream, self.settings.seed, settings.shuffle, settings.epochs)
        asked, given = (
            HeldOut.open(getattr(settings, key), settings.eval_size, f"prompts.{key}") for key in ("eval", "eval_given")
        )
        return prompts, asked, given

    def _open(self, store: Store) -> None:
        """Takes up what is there."""
        settings, self.store = self.settings, store
        columns = settings.columns.scored
        self.payloads = Payloads(self.store, settings.columns)
        self.losses = HeldOutLosses(self.store)
        self.evaluation = Evaluation(
            self.store,
            len(self.held_out),
            settings.columns.evaluated,
            self.held_out.name_of,
        )
        rests = settings.prompts.curriculum
        bounds = Bounds(rests.low, rests.high, rests.rest_hard, rests.rest_easy) if rests else None
        self.curriculum = Curriculum(self.store, bounds, len(self.prompts), self.prompts.row)
        self.turns = Turns(first_id=time.time_ns() // 1_000_000 * 1_000)  # beyond those of a broker before this one
        self.records = Records(self.store)
        self.groups = GroupTracker(
            self.store,
            Gate(settings.gate.groups_per_step, settings.gate.window, settings.gate.max_lag),
            columns,
            settings.steps,
            self.prompts.limit,
            settings.gate.prefetch,
            self._release,
            self._dropped,
            self.curriculum.next,
            self._source_of,
        )
        self.versions = Versions(self.store)
        self.members = Members(self.store)
        self.meanwhile.knows = lambda identity: self.members.get(identity) is not None
        evaluated = (column for column in settings.columns.evaluated if not column.of_step)
        self.scorers = list(dict.fromkeys(column.scorer for column in (*columns, *evaluated)))
        """Kinds of actors that write columns."""
        self.receivers_changed = False
        """The trainer is to be told, with this turn, who is here and serves what."""

    def _source_of(self, number: int) -> str:
        """Of a training group that was finished when nothing was asked by source."""
        return self.payloads.source(("train", number)) if self.settings.columns.by_source else ""

    def asked_of(self, draw: int) -> EvalSampling:
        """How the evaluation prompt of this draw is answered."""
        return self.settings.prompts.eval_sampling.get(self.held_out.name_of(draw), EvalSampling())

    def sampling(self, purpose: Purpose, draw: int) -> Sampling:
        """How rollouts are told to answer a prompt."""
        if purpose == "train":
            return self.settings.sampling
        return self.asked_of(draw).of(self.settings.eval_sampling)

    def holds(self, purpose: str | None = None) -> Iterator[Holds[Any]]:
        """Everything that somebody works on: leases and offers."""
        if purpose in (None, "train"):
            yield from (self.groups.leases.holds, self.groups.replay.holds)
        if purpose in (None, "turn"):
            yield self.turns.holds
        if purpose in (None, "eval"):
            yield from (self.evaluation.leases.holds, self.evaluation.replay.holds)

    def lost(self, member: Member) -> None:
        """``member`` is dead."""
        self.release(member.identity)
        self.receivers_changed = True

    def left(self, member: Member) -> None:
        """``member`` goes in good order: what it held is no worse for it."""
        for work in (self.groups.leases, self.evaluation.leases, self.turns):
            for number in work.holds.of(member.identity):
                work.give_back(number)
        self.lost(member)

    def release(self, identity: str) -> None:
        """What this actor held is free again."""
        released = [key for holds in self.holds() for key in holds.release(identity)]
        if released:
            log.info("released", held=released, holder=identity)

    def give_back(self, holder: str) -> None:
        """The credit of something that ``holder`` never got, or has lost."""
        member = self.members.get(holder)
        if member:
            member.given -= 1

    def kept_of(self, purpose: Purpose, lease: Lease) -> dict[str, np.ndarray]:
        """What gateways have had kept of the sessions of a group that is leased now."""
        if not self.settings.agents:
            return {}
        if not lease.granted:
            self.records.begin((purpose, lease.number))
        return {name: as_bytes(data) for name, data in self.records.of((purpose, lease.number)).items()}

    def sessions_ended(self, purpose: Purpose, number: int) -> None:
        """The group is finished, or begins anew, or never will be: nothing is kept of its sessions."""
        if self.settings.agents:
            self.turns.end((purpose, number))
            self.records.end((purpose, number))

    def _release(self, number: int) -> None:
        """A training group is not needed any more at all."""
        self.payloads.delete(number)
        self.sessions_ended("train", number)

    def serves_current(self, rollout: Member) -> bool:
        """It serves a version of the present timeline."""
        return self.versions.serves(rollout.version, rollout.digest)

    def drop(self, number: int, reason: str, kind: DropKind) -> None:
        """The group will never be trained on."""
        self.payloads.forget(("train", number))
        self.groups.drop(number, reason, kind)

    def drop_any(self, purpose: Purpose, number: int, reason: str, kind: DropKind) -> None:
        """Of training or of evaluation."""
        if purpose == "train":
            self.drop(number, reason, kind)
        else:
            self.drop_evaluation(number, reason)

    def _dropped(self, number: int, reason: str, kind: DropKind) -> None:
        reason = plain(reason)
        self.recorder.drop(number, reason, kind)
        self.traces.dropped(number, reason)
        self.progress.totals["prompts_dropped"] += kind == "prompt"

    def drop_evaluation(self, number: int, reason: str) -> None:
        """The evaluation prompt will have no reward."""
        log.warning("an evaluation prompt has no reward", group=number, reason=reason)
        self.sessions_ended("eval", number)
        self.payloads.forget(("eval", number))
        self.progress.totals["eval_unusable"] += self.evaluation.open(number)
        self.record_evaluation(self.evaluation.drop(number, reason))

    def record_evaluation(self, finished: Any) -> None:
        """Writes down a round, if this is one that is complete."""
        if finished is None:
            return
        reward = finished.mean()
        log.info("evaluated", label=finished.label, reward=reward, unusable=len(finished.unusable))
        if self.progress.phase == "training":
            best_version.consider_end(self)
        self.recorder.evaluated(finished.answers)
        self.recorder.evaluation(
            {
                "step": finished.step,
                "label": finished.label,
                "reward": reward,
                "sets": finished.means(),
                "parts": finished.means_of_parts(),
                "prompts": finished.answered,
                "unusable": len(finished.unusable),
                "version_min": min(finished.versions, default=-1),
                "version_max": max(finished.versions, default=-1),
                "time": time.time(),
            }
        )

    @property
    def steps_to_come(self) -> int:
        """As many as the run is to have, or as its prompts give, where these end before."""
        groups, wanted = self.groups, self.settings.steps
        return wanted if groups.draws is None else min(wanted, groups.draws // groups.gate.batch)

    def lacking(self, step: Step) -> list[Column]:
        """What the trainer waits for, of a step that is taken."""
        return [column for column in self.settings.columns.of_step if column.name not in step.columns]

    def covered(self) -> int:
        """The version that durable checkpoints of all learners cover."""
        return min(self.progress.checkpoints.get(kind, 0) for kind in self.settings.learners)

    def ended_with(self) -> int:
        """The version that all learners have ended the run with; 0 while one has not."""
        return min(self.progress.final_checkpoints.get(kind, 0) for kind in self.settings.learners)

    def tell_trainer(self, message: m.Message) -> None:
        """Unasked."""
        for trainer in self.members.of_kind("trainer"):
            self.router.send(trainer.identity, message)

    def serve_newest(self) -> None:
        """Rollouts without an engine are never behind: what they give is no version's."""
        if self.settings.without_engine:
            newest = self.versions.latest
            for rollout in self.members.of_kind("rollout"):
                rollout.version, rollout.digest = newest, self.versions.digests.get(newest, "")

    def receivers(self) -> m.Receivers:
        """What each live rollout serves that versions are sent to."""
        every = [] if self.settings.without_engine else self.members.of_kind("rollout")
        serves = {r.identity: (r.version, r.digest) if self.serves_current(r) else (-1, "") for r in every}
        return m.Receivers(serves=serves)
