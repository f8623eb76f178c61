"""When the trainer's ranks may use their devices, where these are the rollouts' too (`run.placement`: colocated)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from penstock.services.learning.model_learner import ModelLearner
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime import health
from penstock.services.runtime.device_turn import TURNS, TrainersTurn, devices_here


class Shift:
    """Of one rank. The first rank of a machine speaks for all that are there; every rank calls every method, in the
    same order."""

    def __init__(self, world: World, folder: Path, device: str, patience_s: float) -> None:
        self._world, self._turn = world, None
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            self._turn = TrainersTurn(folder / TURNS, devices_here(device, here), patience_s)

    @property
    def held_s(self) -> float:
        """How long it was the trainer's turn, up to now; on a rank that speaks for others."""
        return self._turn.held_s if self._turn else 0.0

    @property
    def waited_s(self) -> float:
        """How long the last turn took to come."""
        return self._turn.waited_s if self._turn else 0.0

    def take(self, wait: Callable[[], None] = health.beat) -> None:
        """Until guests sleep; rank 0 calls it before the others. Raises `TurnError`."""
        if self._turn:
            self._turn.take(wait)

    def begin(self, learner: ModelLearner | None = None) -> None:
        """Once all ranks have taken their devices; ``learner`` was resting."""
        self._world.gather(b"")
        if learner:
            learner.wake()

    def end(self, learner: ModelLearner) -> None:
        """``learner`` rests, and others may use the devices."""
        learner.rest()
        self._world.gather(b"")
        if self._turn:
            self._turn.give()
