"""The trainer actor: take, train, commit, publish. Rank 0 of its world; the others are `worker_rank`s."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import structlog

from penstock.protocols.messages import (
    Batch,
    Canary,
    Commit,
    CommitVersion,
    EvalLoss,
    HeldOutRequest,
    HeldOutRow,
    HeldOutRows,
    LedgerRow,
    LedgerTail,
    Message,
    Resumed,
    Skip,
)
from penstock.services.learning import checkpoint
from penstock.services.learning.handed_on import HandedOn
from penstock.services.learning.saving import Saving
from penstock.services.learning.step_desk import ANSWER_DEADLINE_S, StepDesk
from penstock.services.modeling.precision import LOGPROBS
from penstock.services.runtime import failpoint
from penstock.services.runtime.actor import Actor, ActorContext
from penstock.services.runtime.checkpoint_folders import MIXTURES, TAIL_STEPS
from penstock.services.runtime.errors import SetupError
from penstock.services.trainer.algorithm_config import CustomFunction
from penstock.services.trainer.canary import CanaryBound
from penstock.services.trainer.canary_scores import score
from penstock.services.trainer.held_out import START, HeldOut, HeldOutSettings, PairSettings, pack_rows
from penstock.services.trainer.mismatch import far_apart
from penstock.services.trainer.rank_setup import TrainerSettings, make_exporter, make_rank, train
from penstock.services.trainer.worker_rank import WorkerRank
from penstock.services.weights.sender.publication import Publication
from penstock.services.weights.sender.publisher import Publisher
from penstock.services.weights.sender.snapshot import Snapshot

log = structlog.get_logger()

LOADING_POLL_S = 0.005


class Trainer:
    """The trainer process. `run` returns the reason it ended for."""

    def __init__(self, context: ActorContext, settings: TrainerSettings) -> None:
        self._settings = settings
        self.actor = Actor("trainer", context)
        rank = make_rank(context, settings)
        self._world, self._learner, self._shift = rank.world, rank.learner, rank.shift
        self._tail = [LedgerRow(**row) for row in rank.tail]
        """The last committed steps, for a broker whose store has lost them."""
        kept = settings.trainer.checkpoint
        saver = checkpoint.Saver(self._learner, rank.tokenizer, settings.checkpoints, kept)
        handed_on = HandedOn(kept.then_words, kept.then_s, settings.checkpoints, context.folder / "logs/trainer.then")
        followed = (settings.reference_every, settings.mixtures)
        self._saving = Saving(self._learner, saver, self.actor.mailbox, kept.keep_best, handed_on, *followed)
        self._desk = StepDesk(self.actor, self._turn, self._world.keep_awake)
        exporter = make_exporter(self._learner, settings)
        clock = self._waiting_clock if self._shift else None
        self._publisher = Publisher(
            settings.weights, exporter, settings.run_key, self.actor.mailbox, context.keys, clock=clock
        )
        self._publication: Publication | None = None
        """The last one."""
        self._canary = settings.canary(self._learner, rank.tokenizer)
        table, own = LOGPROBS[settings.dtype], settings.weights.canary_tolerance
        path = settings.checkpoints.parent / "canary.json"
        self._bound = CanaryBound(path, settings.dtype, own or table, own is not None)
        self._publisher.loaded = lambda loaded: self._bound.note(loaded.canary)
        self._held_out: HeldOut | None = None
        self._measured = -1
        """The version whose loss on held-out rows is known."""
        self._skipped = 0
        """Steps in a row, up to now, that changed no weight."""

    def run(self) -> str:
        """Trains until the run is over or it is told to stop."""
        self.actor.version = self._learner.version
        self.actor.introduction = lambda: [self._ledger_tail()]
        self.actor.join()
        resumed = self.actor.mailbox.ask(self._ledger_tail(), ANSWER_DEADLINE_S)
        assert isinstance(resumed, Resumed)
        self._world.order("publish")
        behind = self._learner.version < resumed.committed
        if behind:
            log.info("redoing steps", from_version=self._learner.version, to_version=resumed.committed)
        first = Publication(self._learner.version, self._score_canary(), quiet=behind)
        self._publication = self._publisher.publish(first)
        self._ask_held_out()
        if not self._learner.version and self._held_out and self._held_out.due(0):
            self._measure()
        while (batch := self._take()) is not None:
            self._train(batch)
        self._end()
        self._world.order("end")
        self._saving.close()
        self._publisher.close()
        self._world.close()
        if self._publisher.error:
            raise self._publisher.error
        assert self._desk.stopped
        self.actor.leave(self._desk.stopped)
        return self._desk.stopped

    def _end(self) -> None:
        """The last version is saved; where the run is over, what others still do is waited for."""
        self._settle()
        if self._learner.version and not self._publisher.error:  # else it is what it began as
            self._work()
            if self._desk.stopped is None:
                self._measure()
            self._save()
        if not self._publisher.error:
            self._rest(last=True)  # a critic has its last version to save, too
        if self._desk.stopped is None:
            self._saving.finish(final=True)
            self._desk.until_stopped()
        self._saving.finish(final=False)
        self._saving.hand_on(stopped=True)

    def _turn(self) -> None:
        """Beside whatever is waited for. Raises what has ended the publisher, without which there is no use in going
        on."""
        if self._publisher.error:
            raise self._publisher.error
        if self._shift:
            self._shift.remind()
        self._saving.poll()

    def _take(self) -> Batch | None:
        """The next batch, once there is one; others may have the devices meanwhile."""
        self._rest()
        batch = self._desk.take(self._learner.version)
        assert not isinstance(batch, Skip)
        if batch is not None:
            self._work()
        return batch

    def _rest(self, last: bool = False) -> None:
        """Others have the devices, unless nobody could use them: steps are redone, or this is about to end and save;
        ``last``: it has saved."""
        assert self._publication
        useful = not self._desk.stopped and self._shift and (not self._publication.quiet or self._shift.wanted())
        if self._shift and not self._shift.resting and (last or useful):
            self._settle()
            self._shift.give(self._learner, self._publisher.ranks)

    def _work(self) -> None:
        if not self._shift or not self._shift.resting:
            return
        # Whoever sleeps cannot load it; while a critic works they do, and sleep on.
        while self._publisher.loading and not self._desk.stopped and not self._shift.wanted():
            self._desk.hear(LOADING_POLL_S)
            self._world.keep_awake()
        self._shift.take(self._desk.hear, self._learner, self._publisher.ranks)

    def _waiting_clock(self) -> float:
        """Seconds, but for those in which rollouts sleep because the trainer works."""
        return time.monotonic() - (self._shift.held_s if self._shift else 0.0)

    def _train(self, batch: Batch) -> None:
        started = time.monotonic()
        waited = 0.0

        def before_update() -> None:
            nonlocal waited
            begun = time.monotonic()
            assert self._publication
            self._desk.wait(self._publication.read)
            waited += time.monotonic() - begun  # it may be asked twice

        with self.actor.busy():
            self._world.order("train", batch)
            metrics = train(self._learner, batch, self._settings, before_update)
            self._count_skips(batch.step, metrics)
            canary = self._score_canary()
        seconds = time.monotonic() - started
        metrics |= {
            "wait_s": self._desk.waited_s,
            "train_step_s": seconds,
            "trainer_tokens_per_s": metrics["tokens"] / seconds,
            **self._learner.flops.metrics(seconds, self._world.size),
            "publish_wait_s": waited,
            **({"turn_wait_s": self._shift.waited_s} if self._shift else {}),
            **self._learner.memory.metrics(),
        }
        self._settle()  # the ledger lets us take one step ahead of what is committed, and no more
        version = self._learner.version

        def commit(snapshot: Snapshot, published: CommitVersion | None) -> Future[Message]:
            return self._commit(batch, snapshot, published, metrics)

        # While steps are redone rollouts hold newer versions already: nothing is offered.
        quiet = version < batch.committed
        self._publication = self._publisher.publish(Publication(version, canary, commit, quiet))
        if self._held_out and self._held_out.due(version):
            self._measure()  # beside the version's way out
        log.info("step", step=batch.step, version=version, reward=round(metrics["reward"], 4))
        self._warn_of_mismatch(batch.step, metrics)
        if version % self._settings.trainer.checkpoint.every == 0:
            self._settle()
            self._save()

    def _count_skips(self, step: int, metrics: dict[str, float]) -> None:
        """Raises `SetupError` where nothing is learned any more."""
        config = self._settings.trainer
        self._skipped = self._skipped + 1 if metrics["skipped"] >= 1 else 0
        if self._skipped < min(config.max_consecutive_skipped, config.counted_steps):
            return
        choices = (config.algorithm.advantage, config.algorithm.loss, config.algorithm.correction)
        own = [choice.function for choice in choices if isinstance(choice, CustomFunction)]
        where = f"in {', '.join(own)}" if own else "for a smaller trainer.optimizer.lr, or rewards of another size"
        raise SetupError(
            f"trainer.algorithm: {self._skipped} steps in a row were skipped, the last one step {step}, since loss or "
            f"gradient are not finite (loss {metrics['loss']:g}, gradient norm {metrics['grad_norm']:g}); look {where} "
            f"(trainer.max_consecutive_skipped={config.max_consecutive_skipped})"
        )

    def _warn_of_mismatch(self, step: int, metrics: dict[str, float]) -> None:
        bound = self._settings.trainer.mismatch_warning
        if said := far_apart(metrics, bound):
            shown = {name: round(value, 4) for name, value in metrics.items() if name.startswith("mismatch")}
            log.warning(f"{said} (trainer.mismatch_warning)", step=step, bound=bound, **shown)

    def _commit(
        self, batch: Batch, snapshot: Snapshot, published: CommitVersion | None, metrics: dict[str, float]
    ) -> Future[Message]:
        """Called by the publisher's thread, once the version that the step has yielded is known by its digest."""
        digest = snapshot.digest
        metrics |= {"mismatch_bound": self._settings.trainer.mismatch_warning}
        metrics |= {"gather_s": snapshot.cost.gather_s, "digest_s": snapshot.cost.digest_s}
        failpoint.reach("trained", batch.step)
        numbers = [group.number for group in batch.groups]

        def durable(answer: Future[Message]) -> None:
            if answer.exception() is not None:
                return
            failpoint.reach("committed", batch.step)
            row = LedgerRow(step=batch.step, groups=numbers, seed=batch.seed, max_lag=batch.max_lag, digest=digest)
            self._tail = [*self._tail, row][-TAIL_STEPS:]
            self.actor.version = snapshot.version

        message = Commit(step=batch.step, groups=numbers, digest=digest, metrics=metrics, version=published)
        answer = self.actor.mailbox.ask_later(message, ANSWER_DEADLINE_S)
        answer.add_done_callback(durable)
        return answer

    def _settle(self) -> None:
        """Until the last version is committed."""
        if self._publication and not self._publisher.error:
            self._desk.wait(self._publication.committed)

    def _score_canary(self) -> Canary | None:
        if not self._canary:
            return None
        logprobs = score(self._learner, self._canary)
        return Canary(tokens=self._canary, logprobs=logprobs, tolerance=self._bound.tolerance)

    def _ask_held_out(self) -> None:
        """For the rows that the loss is measured on, if it is."""
        if not self._settings.held_out.sets:
            return
        rows, begin, more = list[HeldOutRow](), 0, True
        while more:
            said = self._desk.wait(self.actor.mailbox.ask_later(HeldOutRequest(begin=begin), ANSWER_DEADLINE_S))
            assert isinstance(said, HeldOutRows)
            rows, begin, more = [*rows, *said.rows], said.next, said.more
        self._world.order("rows")
        packed = self._world.share(pack_rows(rows))
        self._held_out = self._settings.held_out_rows(packed, self._learner.model.config)

    def _measure(self) -> None:
        """The loss on held-out rows, of a version of which it is not known yet."""
        if self._held_out and self._measured != self._learner.version:
            self._world.order("measure")
            found = self._held_out.measure(self._learner)
            said = EvalLoss(step=self._learner.version, sets=found.losses, pairs=found.pairs)
            self.actor.mailbox.ask(said, ANSWER_DEADLINE_S)
            self._measured = self._learner.version
            self._learner.memory.metrics()  # which are no step's

    def _ledger_tail(self) -> LedgerTail:
        return LedgerTail(version=self.actor.version, steps=list(self._tail))

    def _save(self) -> None:
        """Begins to write a checkpoint beside the next steps; one that is not done yet is waited for."""
        self._saving.finish(final=False)
        self._world.order("save")
        self._saving.begin([row.model_dump() for row in self._tail])


def make(context: ActorContext, config: Any, kind: str) -> Trainer | WorkerRank:
    """The actor, for a run's whole config; of the ranks beside rank 0, what does as that orders."""
    settings = TrainerSettings(
        trainer=config.trainer,
        # Versions that nobody is sent need no canary.
        weights=config.weights.model_copy(update={"canary_tokens": 0})
        if config.rollout.without_engine
        else config.weights,
        model_path=context.model_path,
        dtype=config.model.dtype,
        head_dtype=config.model.head_dtype,
        critic_warmup=config.critic_warmup,
        reference_here=config.reference_in_trainer,
        reference_every=config.reference.refresh_every,
        mixtures=context.folder / MIXTURES if config.reference.mix < 1 else None,
        temperature=config.rollout.sampling.temperature,
        routing_replay=config.rollout.sampling.routing_replay,
        run_key=context.run_key,
        checkpoints=context.folder / "checkpoints",
        profiles=context.folder / "profiles",
        archive=context.folder / "archive",
        archived=0 if config.replay.archive == "none" else config.replay.archive,
        columns=config.columns,
        colocated=config.run.colocated,
        turn_s=config.run.turn_s,
        deterministic=config.run.deterministic,
        template=config.template,
        held_out=HeldOutSettings(
            sets=tuple(config.prompts.eval_given) if config.prompts.measures else (),
            every=config.prompts.eval_every,
            before=config.prompts.eval_before,
            turns=config.rollout.given.turns,
            longest=config.rollout.engine.max_length,
            pairs=_pairs(config, context.folder) if config.rollout.given.rejected else None,
        ),
    )
    return WorkerRank(context, settings) if int(os.environ.get("RANK", "0")) else Trainer(context, settings)


def _pairs(config: Any, folder: Path) -> PairSettings | None:
    """Of a run that trains on given pairs as DPO does."""
    advantage = config.trainer.algorithm.advantage
    return PairSettings(advantage.beta, advantage.shape, folder / START) if advantage.type == "online_dpo" else None
