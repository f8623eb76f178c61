"""When the trainer's ranks may use their devices, where these are the rollouts' too (`run.placement`: colocated)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from penstock.services.learning.model_learner import ModelLearner
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime import health
from penstock.services.runtime.device_turn import TURNS, TrainersTurn, devices_here
from penstock.services.weights.sender.rank_sender import RankSender


class Shift:
    """Of one rank: every rank has a turn of its own, at its own device, and calls every method, in the same order."""

    def __init__(self, world: World, folder: Path, device: str, patience_s: float) -> None:
        self._world, self._patience_s = world, patience_s
        place = int(os.environ.get("LOCAL_RANK", "0"))
        devices = devices_here(device)
        mine = devices[place] if len(devices) > 1 else devices[0]
        self._turn = TrainersTurn(folder / TURNS, mine, world.named("trainer"), patience_s)

    @property
    def held_s(self) -> float:
        """How long it was the trainer's turn, up to now."""
        return self._turn.held_s

    @property
    def waited_s(self) -> float:
        """How long the last turn took to come."""
        return self._turn.waited_s

    def take(self, wait: Callable[[], None] = health.beat) -> None:
        """Until guests sleep. Raises `TurnError`."""
        self._turn.take(wait)

    def remind(self) -> None:
        """While it rests: guests may begin."""
        self._turn.remind()

    def begin(self, learner: ModelLearner | None = None, sender: RankSender | None = None) -> None:
        """Once all ranks have taken their devices; ``learner`` and ``sender`` were resting."""
        self._world.meet(self._patience_s)
        if learner:
            learner.wake()
        if sender:
            sender.wake()

    def end(self, learner: ModelLearner, sender: RankSender | None) -> None:
        """``learner`` and ``sender`` rest, and others may use the devices."""
        if sender:
            sender.rest()
        learner.rest()
        self._world.meet(self._patience_s)
        self._turn.give()
