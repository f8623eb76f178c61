"""A rank of the critic: what all of them do alike, and what those beside rank 0 are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.protocols.columns import ColumnTable
from penstock.protocols.messages import Batch
from penstock.services.critic.step_learner import StepLearner
from penstock.services.learning import checkpoint
from penstock.services.learning.batch import TrainingBatch, open_batch
from penstock.services.learning.shift import OF_SHIFTS, Shift
from penstock.services.modeling.load import vocabulary_of
from penstock.services.modeling.parallel.fsdp import local

Say = Callable[[TrainingBatch, Sequence[np.ndarray]], None]
"""What is done with a step's values, a ``[tokens]`` of each trajectory, before they are learned from."""


@dataclass(frozen=True)
class Steps:
    """The steps of a critic, the same on every rank."""

    learner: StepLearner
    saver: checkpoint.Saver
    columns: ColumnTable
    deterministic: bool

    def train(self, batch: Batch, say: Say = lambda step, values: None) -> dict[str, float]:
        """What the model says of ``batch``, which ``say`` is given unless the batch has it already, and then one step
        of learning. Returns the step's metrics."""
        step = open_batch(batch, self.columns, vocabulary=vocabulary_of(self.learner.model))
        if self.learner.COLUMN not in step.token_values:
            values = self.learner.values(step)
            say(step, values)
            step = step.with_tokens(self.learner.COLUMN, values)
        return self.learner.train(step)

    def digest(self) -> str:
        """Of all that is trained, cut as it is over the ranks, where the run is ``deterministic``; else empty."""
        if not self.deterministic:
            return ""
        hasher = hashlib.blake2b(digest_size=16)
        for name, parameter in sorted(self.learner.parameters.items()):
            hasher.update(name.encode())
            hasher.update(local(parameter).cpu().view(torch.uint8).numpy())
        parts = self.learner.world.gather(hasher.digest())
        return parts[0].hex() if len(parts) == 1 else hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


class WorkerRank:
    """Rank 1 and above. `run` returns when rank 0 says so."""

    def __init__(self, steps: Steps, shift: Shift | None) -> None:
        self._steps, self._shift = steps, shift

    @property
    def version(self) -> int:
        """That this rank's part of the model is of."""
        return self._steps.learner.version

    def run(self) -> None:
        """Does as rank 0 orders."""
        world = self._steps.learner.world
        while True:
            what, batch = world.obey()
            if what == "train":
                assert batch
                self._steps.train(batch)
                self._steps.digest()
            elif what == "skip":
                self._steps.learner.version = int(world.share())
            elif what == "save":
                self._steps.saver.begin()
            elif what in OF_SHIFTS:
                assert self._shift
                self._shift.obey(what, self._steps.learner)
            elif what == "end":
                self._steps.saver.close()
                world.close()
                return
