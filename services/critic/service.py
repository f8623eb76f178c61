"""The critic actor: take, give values, train. What it says of a step, the trainer's advantages are made of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from penstock.protocols.columns import PROCESS
from penstock.protocols.messages import Batch, Learned, Skip, StepColumn
from penstock.services.critic.config import CriticConfig, shares_devices
from penstock.services.critic.learner import CriticLearner
from penstock.services.critic.process_learner import ProcessLearner
from penstock.services.critic.ranks import Steps, WorkerRank
from penstock.services.critic.step_learner import StepLearner
from penstock.services.learning import checkpoint
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.handed_on import HandedOn
from penstock.services.learning.saving import Saving
from penstock.services.learning.shift import Shift
from penstock.services.learning.step_desk import ANSWER_DEADLINE_S, StepDesk
from penstock.services.modeling import determinism
from penstock.services.modeling.head import compute_head_in
from penstock.services.modeling.load import check_vocabulary, device_of, load_tokenizer
from penstock.services.modeling.lora import Adapter
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import Shape, World, local_device
from penstock.services.modeling.sight import give_learners_sight
from penstock.services.runtime import failpoint
from penstock.services.runtime.actor import Actor, ActorContext

log = structlog.get_logger()

REMEMBERED = 2
"""Steps whose groups it knows, from its checkpoint too: by those of the last one the broker sees whether that step was
taken anew since, with others."""


class Critic:
    """The critic process, a learner on the trainer's ledger: rank 0 of its world. `run` returns the reason it ended
    for.

    Version s is what the steps before s have made of it. For step s it says the values of version s, durably, before it
    trains on them: a trainer or a critic that is started again finds those of every step that is to be redone.
    """

    def __init__(
        self, context: ActorContext, steps: Steps, tail: list[dict[str, Any]], config: CriticConfig, shift: Shift | None
    ) -> None:
        self._steps, self._learner, self._config, self._shift = steps, steps.learner, config, shift
        self._world = self._learner.world
        self.actor = Actor("critic", context)
        kept, folder = config.checkpoint, context.folder
        handed_on = HandedOn(kept.then_words, kept.then_s, folder / "critic/checkpoints", folder / "logs/critic.then")
        self._saving = Saving(self._learner, steps.saver, self.actor.mailbox, kept.keep_best, handed_on)
        self._desk = StepDesk(self.actor, self._saving.poll, self._world.keep_awake)
        self._tail = tail
        """Numbers of the groups of the last steps, newest last."""

    def run(self) -> str:
        """Trains until the run is over or it is told to stop."""
        self.actor.version = self._learner.version
        self.actor.join()
        while (batch := self._take()) is not None:
            self._train(batch)
        if self._learner.version:
            self._work()
            self._save()
            self._rest()
        self._saving.finish(final=self._desk.stopped is None)
        self._saving.hand_on(self._desk.stopped is not None)
        reason = self._desk.until_stopped()
        self._world.order("end")
        self._saving.close()
        self._world.close()
        self.actor.leave(reason)
        return reason

    def _take(self) -> Batch | None:
        """The next batch, once there is one; others may have the devices meanwhile."""
        while True:
            self._rest()
            said = self._desk.take(self._learner.version, self._tail[-1]["groups"] if self._tail else [])
            if said is not None:
                self._work()
            if not isinstance(said, Skip):
                return said
            log.warning("goes on with another step: the store is not the one before", step=said.step, was=self.version)
            self._saving.finish(final=False)
            self._world.order("skip")
            self._world.share(str(said.step).encode())
            self._learner.version = self.actor.version = said.step
            self._tail = []
            if said.step:
                self._save()  # before those of later numbers go: it would be gone with this process
                self._saving.finish(final=False)
            self._steps.saver.forget_above(said.step)

    def _rest(self) -> None:
        if self._shift and not self._shift.resting:
            self._shift.give(self._learner)

    def _work(self) -> None:
        if self._shift and self._shift.resting:
            self._shift.take(self._desk.hear, self._learner)

    @property
    def version(self) -> int:
        """How many steps it knows of."""
        return self._learner.version

    def _train(self, batch: Batch) -> None:
        started = valued = time.monotonic()

        def say(step: TrainingBatch, values: Sequence[np.ndarray]) -> None:
            """They are durable when this returns."""
            nonlocal valued
            said = StepColumn(step=batch.step, column=self._learner.COLUMN, values=_by_group(batch, step, values))
            self._desk.wait(self.actor.mailbox.ask_later(said, ANSWER_DEADLINE_S))
            valued = time.monotonic()
            failpoint.reach("critic-valued", batch.step)

        with self.actor.busy():
            self._world.order("train", batch)
            metrics = self._steps.train(batch, say)
        failpoint.reach("critic-trained", batch.step)
        digest = self._steps.digest()
        self._tail = [*self._tail, {"step": batch.step, "groups": [g.number for g in batch.groups]}][-REMEMBERED:]
        self.actor.version = self._learner.version
        metrics |= {"critic_step": float(batch.step)}
        metrics |= {"critic_turn_wait_s": self._shift.waited_s} if self._shift else {}
        metrics |= {"critic_values_s": valued - started, "critic_train_s": time.monotonic() - valued}
        learned = Learned(step=batch.step, digest=digest, metrics=metrics)
        self._desk.wait(self.actor.mailbox.ask_later(learned, ANSWER_DEADLINE_S))
        log.info("step", step=batch.step, version=self._learner.version, loss=round(metrics["critic_loss"], 5))
        if self._learner.version % self._config.checkpoint.every == 0:
            self._save()

    def _save(self) -> None:
        self._saving.finish(final=False)
        self._world.order("save")
        self._saving.begin(self._tail)


def _by_group(batch: Batch, step: TrainingBatch, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """``values`` of trajectories, joined for each group of the batch; none of a group that could not be read."""
    found = []
    for taken in batch.groups:
        mine = [values[int(row)] for row in np.flatnonzero(step.groups == taken.number)]
        found.append(np.concatenate(mine) if mine else np.zeros(0, np.float32))
    return found


def make(context: ActorContext, config: Any, kind: str) -> Critic | WorkerRank:
    """The actor, for a run's whole config, at its newest checkpoint or at the start; of the ranks beside rank 0, what
    does as that orders."""
    critic: CriticConfig = config.critic
    torch.set_num_threads(context.threads)
    device = local_device(device_of(critic.device, "critic.device"), "critic")
    world, path = World.of_torchrun(device, Shape.of(critic)), critic.path or context.model_path
    key = "critic.path" if critic.path else "model.path"
    check_vocabulary(context.model_path, path, key)
    if config.run.deterministic:
        determinism.pin(context.folder, world.named(kind), context.threads)
    shift = None
    if config.run.colocated and shares_devices(config):
        shift = Shift(world, kind, context.folder, critic.device, config.run.turn_s, opens=False)
        shift.start()
    folder = context.folder / "critic" / "checkpoints"
    own = critic.pinned() if config.run.deterministic else critic
    processes = config.critic_column == PROCESS

    def learner_of(weights: str) -> StepLearner:
        begun = Path(weights) if weights != path else None  # a checkpoint; with an adapter it has that alone
        adapter = Adapter.of(critic.lora, begun, "critic.lora") if critic.lora else None
        model = load_trainable(
            path if adapter else weights, world, device, config.model.dtype, "language" if processes else "value",
            adapter, critic.weights_on_host, key,
        )  # fmt: skip
        give_learners_sight(model, path, config.model.dtype, device, key)
        steps, algorithm = config.trainer.counted_steps, config.trainer.algorithm
        if processes:
            compute_head_in(model, config.model.head_dtype)  # as the reference, beside which it is read
            return ProcessLearner(model, own, steps, config.rollout.sampling.temperature, world)
        gamma, lam = (_of_returns(config, name) for name in ("gamma", "lam"))
        return CriticLearner(model, own, steps, gamma, lam, algorithm.penalties, world)

    learner, tail = checkpoint.open_learner(folder, world, path, learner_of)
    kept, tokenizer = critic.checkpoint, load_tokenizer(path, key=key)
    saver = checkpoint.Saver(learner, tokenizer, folder, kept)
    steps = Steps(learner, saver, config.columns, config.run.deterministic)
    return WorkerRank(steps, shift) if world.rank else Critic(context, steps, tail, critic, shift)


def _of_returns(config: Any, name: str) -> float:
    """The critic's own option, else the advantage's, else 1."""
    own = getattr(config.critic, name)
    return float(getattr(config.trainer.algorithm.advantage, name, 1.0) if own is None else own)
