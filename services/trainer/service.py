"""The trainer actor: take, train, commit, publish."""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

import structlog
import torch

from protocols.mailbox import DeadlineError, RefusedError
from protocols.messages import Batch, Checkpointed, Commit, Exhausted, LedgerRow, LedgerTail, Message, Resumed, Take
from services import determinism, failpoint
from services.actor import Actor, Place
from services.model import device_of, load_model, load_tokenizer
from services.trainer import checkpoint
from services.trainer.batch import open_batch
from services.trainer.config import TrainerConfig
from services.trainer.learner import Learner
from services.trainer.publisher import Publisher, Snapshot
from services.weights.config import WeightsConfig

log = structlog.get_logger()

TAIL_STEPS = 200
TAKE_DEADLINE_S = 60.0
ANSWER_DEADLINE_S = 120.0


@dataclass(frozen=True)
class TrainerSettings:
    """Everything the trainer needs to know beside its place."""

    trainer: TrainerConfig
    weights: WeightsConfig
    model_path: str
    dtype: str
    temperature: float
    max_lag: int
    run_key: str
    deterministic: bool = False


class Trainer:
    """The trainer process. `run` returns the reason it ended for."""

    def __init__(self, place: Place, settings: TrainerSettings) -> None:
        torch.set_num_threads(place.threads)
        if settings.deterministic:
            determinism.pin(place.folder, "trainer", place.threads)
        self._settings, self._place = settings, place
        self.actor = Actor("trainer", place)
        self._folder = place.folder / "checkpoints"
        self._folder.mkdir(parents=True, exist_ok=True)
        start = checkpoint.latest(self._folder)
        path = str(start or settings.model_path)
        # The master copy is fp32 whatever the rollouts serve: small updates would vanish in bf16.
        model = load_model(path, "float32", device_of(settings.trainer.device))
        self._tail: list[LedgerRow] = []
        """The last committed steps, for a broker whose store has lost them."""
        self._learner = Learner(model, settings.trainer, settings.dtype, settings.temperature or 1.0)
        if start:
            self._tail = [LedgerRow(**row) for row in checkpoint.restore(self._learner, start)]
            log.info("resumed", version=self._learner.version, path=path)
        self._tokenizer = load_tokenizer(settings.model_path)
        self._publisher = Publisher(settings.weights, settings.dtype, settings.run_key, self.actor.mailbox)

    def run(self) -> str:
        """Trains until the run is over or it is told to stop."""
        self.actor.version = self._learner.version
        self.actor.introduction = lambda: [self._ledger_tail()]
        self.actor.join()
        resumed = self.actor.mailbox.ask(self._ledger_tail(), ANSWER_DEADLINE_S)
        assert isinstance(resumed, Resumed)
        if self._learner.version >= resumed.committed:
            self._publisher.publish(self._stage())
        else:
            log.info("redoing steps", from_version=self._learner.version, to_version=resumed.committed)
        while (batch := self._take()) is not None:
            self._train(batch)
        if not self._publisher.stopped.is_set():
            self._save(final=True)
            self._publisher.stopped.wait()
        elif self._learner.version:
            self._save(final=False)
        self._publisher.close()
        if self._publisher.error:
            raise self._publisher.error
        self.actor.leave(self._publisher.reason)
        return self._publisher.reason

    def _take(self) -> Batch | None:
        """The next batch; None when the run is over, or the trainer is to stop. A wait that lasts is logged with its
        reason."""
        step = self._learner.version
        waited = time.monotonic()
        while True:
            try:
                reply = self._answer(self.actor.mailbox.ask_later(Take(step=step), TAKE_DEADLINE_S))
            except RefusedError as refusal:
                if refusal.code != "not_ready":
                    raise
                log.warning(
                    "waiting for a batch", step=step, waited_s=round(time.monotonic() - waited), reason=str(refusal)
                )
                continue
            except DeadlineError as late:
                log.warning("waiting for the broker", step=step, error=str(late))
                continue
            self.actor.gauges["wait_s"] = self._waited_s = time.monotonic() - waited
            if isinstance(reply, Exhausted):
                log.info("no more steps", steps=reply.steps, reason=reply.reason)
                return None
            assert reply is None or isinstance(reply, Batch)
            failpoint.reach("taken", step)
            return reply

    def _answer(self, future: Future[Message]) -> Message | None:
        """The future's result; None as soon as the trainer is to stop."""
        while not self._publisher.stopped.is_set():
            try:
                return future.result(0.25)
            except FutureTimeout:
                if future.done():
                    raise
        return None

    def _train(self, batch: Batch) -> None:
        started = time.monotonic()
        torch.manual_seed(batch.seed)  # for a loss of the user's own that draws numbers
        with self.actor.busy():
            metrics = self._learner.train(open_batch(batch, self._settings.max_lag))
            trained = time.monotonic()
            snapshot = self._stage()
        metrics |= {
            "wait_s": self._waited_s,
            "train_step_s": trained - started,
            "stage_s": self._publisher.publish_s,
        }
        digest = snapshot.manifest.digest
        failpoint.reach("trained", batch.step)
        self.actor.mailbox.ask(Commit(step=batch.step, digest=digest, metrics=metrics), ANSWER_DEADLINE_S)
        failpoint.reach("committed", batch.step)
        numbers = [group.number for group in batch.groups]
        self._tail.append(LedgerRow(step=batch.step, groups=numbers, seed=batch.seed, digest=digest))
        del self._tail[:-TAIL_STEPS]
        self.actor.version = self._learner.version
        if self._learner.version >= batch.committed:  # not while redoing: rollouts hold newer ones already
            self._publisher.publish(snapshot)
            failpoint.reach("published", batch.step)
        log.info("step", step=batch.step, version=self._learner.version, reward=round(metrics["reward"], 4))
        if self._learner.version % self._settings.trainer.checkpoint.every == 0:
            self._save(final=False)

    def _ledger_tail(self) -> LedgerTail:
        return LedgerTail(version=self._learner.version, steps=list(self._tail))

    def _stage(self) -> Snapshot:
        return self._publisher.stage(self._learner.version, list(self._learner.model.named_parameters()))

    def _save(self, final: bool) -> None:
        keep = self._settings.trainer.checkpoint.keep
        tail = [row.model_dump() for row in self._tail]
        path = checkpoint.save(self._learner, self._tokenizer, self._folder, keep, tail)
        message = Checkpointed(version=self._learner.version, path=str(path), final=final)
        self.actor.mailbox.ask(message, ANSWER_DEADLINE_S)
