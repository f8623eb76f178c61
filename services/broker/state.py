"""What the broker's rooms share: the books, the members, the store, and how far the run has come."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import structlog

from penstock.protocols import messages as m
from penstock.protocols.experience import Group, Sampling, as_bytes, unpack_group
from penstock.protocols.keys import BrokerKeys
from penstock.protocols.mailbox import RouterServer
from penstock.services.broker.archive import Archive
from penstock.services.broker.config import BrokerConfig, GateConfig, PromptsConfig, ReplayConfig, StoreConfig
from penstock.services.broker.membership import Member, Members
from penstock.services.broker.recorder import Recorder
from penstock.services.broker.rules.evaluation import Evaluation, Round
from penstock.services.broker.rules.gate import Gate
from penstock.services.broker.rules.groups import Experience
from penstock.services.broker.rules.ledger import Step
from penstock.services.broker.rules.replay import Scorer
from penstock.services.broker.store import Store, StoreError
from penstock.services.broker.versions import Versions
from penstock.services.data import open_source
from penstock.services.data.prompts import PromptStream

log = structlog.get_logger()

Phase = Literal["starting", "evaluating_before", "training", "evaluating_after", "done", "stopping"]

SAMPLED_STEPS = 40
"""Samples are kept of about this many steps."""


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
class Progress:
    """How far the run has come."""

    phase: Phase = "starting"
    started_at: float = field(default_factory=time.time)
    training_since: float | None = None
    trained_until: float | None = None
    at: float = field(default_factory=time.time)
    """When a step was committed last."""
    final_checkpoint: int = 0
    """The version of the checkpoint that ended the run."""
    stop_reason: str | None = None
    error: str | None = None
    stall: str | None = None
    redoing: bool = False
    """The trainer came with an older version than the last one committed."""
    observed_end: bool = False
    """An observer has read all it wants."""
    last_metrics: dict[str, Any] = field(default_factory=dict)
    totals: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("leased", "finished", "trained", "generated_tokens", "trained_tokens", "reward_errors", "late_answers",
             "lag_max", "tokens_lagging", "taken_up"), 0
        )
    )  # fmt: skip

    publish_cost: tuple[int, m.PublishCost | None] = (-1, None)
    """The version published last, and what that took in the trainer."""
    pauses: dict[str, float] = field(default_factory=dict)
    """Rollout to how long it last stood still for a new version, in seconds."""

    def stop(self, reason: str) -> None:
        """Ends the run; safe from a signal handler."""
        self.stop_reason = self.stop_reason or reason


class BrokerState:
    """See the module's docstring. Used from the broker's one thread."""

    def __init__(self, settings: BrokerSettings, store_url: str) -> None:
        self.settings = settings
        self.progress = Progress()
        self.store = Store(store_url, settings.run, settings.store, settings.store_key)
        stream = open_source(settings.prompts.train)
        self.prompts = PromptStream(stream, settings.seed, settings.prompts.shuffle, settings.prompts.epochs)
        self.held_out = open_source(settings.prompts.eval, held_out=True) if settings.prompts.eval else []
        self.evaluation = Evaluation(min(settings.prompts.eval_size, len(self.held_out)))
        self.records = Recorder(settings.folder, settings.tensorboard)
        self.archive = Archive(settings.folder, settings.replay.archive)
        scorers: list[Scorer] = ["reward", "reference"] if settings.with_reference else ["reward"]
        self.experience = Experience(
            self.store,
            Gate(settings.gate.groups_per_step, settings.gate.window, settings.gate.max_lag),
            scorers,
            settings.steps,
            self.prompts.limit,
            settings.gate.prefetch,
            self.store.delete_payloads,
            self.archive_step,
            self.records.drop,
        )
        self.versions = Versions(self.store)
        self.members = Members(self.store)
        self.payloads: dict[int, bytes] = {}
        """Experience of groups that wait for a scorer."""
        # Last: nothing after it can fail and leave a socket open.
        self.exchange = RouterServer(settings.broker.bind, settings.keys)

    def give_back(self, holder: str) -> None:
        """The credit of something that ``holder`` never got, or has lost."""
        member = self.members.get(holder)
        if member:
            member.given -= 1

    def note(self, member: Member, request: int, refused: list[str]) -> None:
        """What was good of a message is applied; what was not is named."""
        if refused:
            log.warning("scores were refused", sender=member.identity, errors=refused[:3])
        reply = m.Refused(code="bad_message", reason="; ".join(refused[:3])) if refused else m.Ack()
        self.exchange.send(member.identity, reply, request)

    def lost(self, member: Member) -> None:
        """``member`` is dead."""
        self.release(member)
        self.tell_trainer(self.receivers())

    def release(self, member: Member) -> None:
        """What ``member`` held is free again."""
        released = [lease.number for lease in self.experience.leases.release(member.identity)]
        if released:
            log.info("leases released", groups=released, holder=member.name)
        self.experience.replay.withdraw(member.identity)
        self.evaluation.release(member.identity)

    def serves_current(self, rollout: Member) -> bool:
        """It serves a version of the present timeline."""
        return self.versions.serves(rollout.version, rollout.digest)

    def archive_step(self, step: Step) -> None:
        """Writes a step's groups to disk before they are freed."""
        self.store.commit()
        assert step.digest is not None
        self.archive.append(self._read_batch(step), step.digest)

    def drop(self, number: int, reason: str) -> None:
        """The group will never be trained on."""
        self.payloads.pop(number, None)
        self.experience.drop(number, reason)

    def payload(self, number: int) -> bytes:
        """The experience of a group that waits for a scorer."""
        if number not in self.payloads:
            self.payloads[number] = self.store.payloads([number])[0]["experience"]
        return self.payloads[number]

    def score_evaluation(self, number: int, reward: float) -> None:
        """The reward of one evaluation prompt; the last one of a round completes it."""
        finished = self.evaluation.score(number, reward)
        if finished:
            self._record_evaluation(finished)

    def _record_evaluation(self, finished: Round) -> None:
        log.info("evaluated", label=finished.label, reward=finished.mean())
        versions = [v for group in finished.groups.values() for v in group.versions or ()]
        self.records.evaluation(
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

    def batch(self, step: Step) -> m.Batch:
        """What the trainer gets for ``step``."""
        self.store.commit()  # durable before it is sent, and visible to the read below
        batch = self._read_batch(step)
        for number in step.groups:
            self.payloads.pop(number, None)
        if step.step % max(1, self.settings.steps // SAMPLED_STEPS) == 0:
            first: Group = unpack_group(batch.groups[0].experience.data)
            self.records.sample(step.step, first, [float(r) for r in batch.groups[0].rewards])
        return batch

    def _read_batch(self, step: Step) -> m.Batch:
        groups = []
        for number, parts in zip(step.groups, self.store.payloads(step.groups), strict=True):
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
        committed = self.experience.ledger.committed
        return m.Batch(step=step.step, seed=step.seed, groups=groups, committed=committed)

    def tell_trainer(self, message: m.Message) -> None:
        """Unasked."""
        for trainer in self.members.of_kind("trainer"):
            self.exchange.send(trainer.identity, message)

    def receivers(self) -> m.Receivers:
        """What each live rollout serves."""
        rollouts = self.members.of_kind("rollout")
        nothing = (-1, "")
        return m.Receivers(
            serves={r.identity: (r.version, r.digest) if self.serves_current(r) else nothing for r in rollouts}
        )
