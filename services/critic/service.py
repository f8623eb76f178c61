"""The critic actor: take, give values, train. What it says of a step, the trainer's advantages are made of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import structlog
import torch

from penstock.protocols.columns import VALUES, ColumnTable
from penstock.protocols.messages import Batch, Learned, StepColumn
from penstock.services.critic.config import CriticConfig
from penstock.services.critic.learner import CriticLearner
from penstock.services.learning import checkpoint
from penstock.services.learning.batch import TrainingBatch, open_batch
from penstock.services.learning.saving import Saving
from penstock.services.learning.step_desk import ANSWER_DEADLINE_S, StepDesk
from penstock.services.modeling import determinism
from penstock.services.modeling.load import device_of, load_tokenizer
from penstock.services.modeling.parallel.fsdp import local
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime import failpoint
from penstock.services.runtime.actor import Actor, ActorContext

log = structlog.get_logger()

TAIL_STEPS = 2


class Critic:
    """The critic process: a learner on the trainer's ledger. `run` returns the reason it ended for.

    Version s is what the steps before s have made of it. For step s it says the values of version s, durably, before it
    trains on them: a trainer or a critic that is started again finds those of every step that is to be redone.
    """

    def __init__(
        self, context: ActorContext, learner: CriticLearner, tail: list[dict[str, Any]], saver: checkpoint.Saver,
        config: CriticConfig, columns: ColumnTable, deterministic: bool,
    ) -> None:  # fmt: skip
        self._learner, self._config, self._world = learner, config, learner.world
        self._columns, self._deterministic = columns, deterministic
        self.actor = Actor("critic", context)
        self._saving = Saving(learner, saver, self.actor.mailbox, config.checkpoint.keep_best)
        self._desk = StepDesk(self.actor, self._saving.poll)
        self._tail = tail
        """Numbers of the groups of the last steps, newest last."""

    def run(self) -> str:
        """Trains until the run is over or it is told to stop."""
        self.actor.version = self._learner.version
        self.actor.join()
        while (batch := self._take()) is not None:
            self._train(batch)
        if self._learner.version:
            self._save()
        self._saving.finish(final=self._desk.stopped is None)
        reason = self._desk.until_stopped()
        self._saving.close()
        self._world.close()
        self.actor.leave(reason)
        return reason

    def _take(self) -> Batch | None:
        return self._desk.take(self._learner.version, self._tail[-1]["groups"] if self._tail else [])

    def _train(self, batch: Batch) -> None:
        with self.actor.busy():
            step = open_batch(batch, self._columns)
            if VALUES not in step.token_values:
                step = self._say_values(batch, step)
            failpoint.reach("critic-valued", batch.step)
            metrics = self._learner.train(step)
        failpoint.reach("critic-trained", batch.step)
        digest = _digest(self._learner) if self._deterministic else ""
        self._tail = [*self._tail, {"step": batch.step, "groups": [g.number for g in batch.groups]}][-TAIL_STEPS:]
        self.actor.version = self._learner.version
        metrics |= {"critic_step": float(batch.step)}
        learned = Learned(step=batch.step, digest=digest, metrics=metrics)
        self._desk.wait(self.actor.mailbox.ask_later(learned, ANSWER_DEADLINE_S))
        log.info("step", step=batch.step, version=self._learner.version, loss=round(metrics["critic_loss"], 5))
        if self._learner.version % self._config.checkpoint.every == 0:
            self._save()

    def _say_values(self, batch: Batch, step: TrainingBatch) -> TrainingBatch:
        """The step with its values, which are durable now."""
        values = self._learner.values(step)
        by_group = _by_group(batch, step, values)
        self._desk.wait(
            self.actor.mailbox.ask_later(StepColumn(step=batch.step, column=VALUES, values=by_group), ANSWER_DEADLINE_S)
        )
        return step.with_tokens(VALUES, values)

    def _save(self) -> None:
        self._saving.finish(final=False)
        self._saving.begin(self._tail)


def _by_group(batch: Batch, step: TrainingBatch, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """``values`` of trajectories, joined for each group of the batch; none of a group that could not be read."""
    found = []
    for taken in batch.groups:
        mine = [values[int(row)] for row in np.flatnonzero(step.groups == taken.number)]
        found.append(np.concatenate(mine) if mine else np.zeros(0, np.float32))
    return found


def _digest(learner: CriticLearner) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(learner.parameters.items()):
        hasher.update(name.encode())
        hasher.update(local(parameter).cpu().view(torch.uint8).numpy())
    return hasher.hexdigest()


def make(context: ActorContext, config: Any, kind: str) -> Critic:
    """The actor, for a run's whole config; at its newest checkpoint, or at the start."""
    critic: CriticConfig = config.critic
    torch.set_num_threads(context.threads)
    device = device_of(critic.device, "critic.device")
    if config.run.deterministic:
        determinism.pin(context.folder, kind, context.threads)
    folder = context.folder / "critic" / "checkpoints"
    world, path = World(device), critic.path or context.model_path
    gamma, lam = (_of_returns(config, name) for name in ("gamma", "lam"))

    def learner_of(weights: str) -> CriticLearner:
        model = load_trainable(weights, world, device, config.model.dtype, "value")
        return CriticLearner(model, critic, config.trainer.steps, gamma, lam, config.trainer.algorithm.penalties, world)

    learner, tail = checkpoint.open_learner(folder, world, path, learner_of)
    saver = checkpoint.Saver(learner, load_tokenizer(path), folder, critic.checkpoint.keep)
    return Critic(context, learner, tail, saver, critic, config.columns, config.run.deterministic)


def _of_returns(config: Any, name: str) -> float:
    """The critic's own option, else the advantage's, else 1."""
    own = getattr(config.critic, name)
    return float(getattr(config.trainer.algorithm.advantage, name, 1.0) if own is None else own)
