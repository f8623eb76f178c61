"""When a learner's ranks may use their devices, where these are others' too (`run.placement`: colocated)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from penstock.services.learning.model_learner import ModelLearner
from penstock.services.modeling.parallel.world import Order, World
from penstock.services.runtime import health
from penstock.services.runtime.device_room import DeviceRoom
from penstock.services.runtime.device_turn import TURNS, LearnersTurn, devices_here
from penstock.services.weights.sender.rank_sender import RankSender

OF_SHIFTS: tuple[Order, ...] = ("want", "work", "rest")
"""Orders that `Shift.obey` is for."""


class Shift:
    """Of one rank of the learner ``kind``: every rank has a turn of its own, at its own device. Rank 0 calls `take` and
    `give`, which order the others what to do; these call `obey`. Guests begin once one that ``opens`` has let them."""

    def __init__(
        self, world: World, kind: str, folder: Path, device: str, patience_s: float, opens: bool = True
    ) -> None:
        self._world, self._patience_s = world, patience_s
        place = int(os.environ.get("LOCAL_RANK", "0"))
        devices = devices_here(device)
        mine = devices[place] if len(devices) > 1 else devices[0]
        self._turn = LearnersTurn(folder / TURNS, mine, world.named(kind), patience_s, not world.rank, opens)
        self._room = DeviceRoom(mine)
        self.resting = False
        """The devices are others'."""

    @property
    def held_s(self) -> float:
        """How long it was a learner's turn, up to now."""
        return self._turn.held_s

    @property
    def waited_s(self) -> float:
        """How long the last turn took to come."""
        return self._turn.waited_s

    def wanted(self) -> bool:
        """Another learner waits for this rank's device, or has it."""
        return self._turn.wanted()

    def start(self) -> None:
        """The first turn of all ranks, before a model is loaded. Raises `TurnError`."""
        if self._world.rank == 0:
            self.take(health.beat)
            return
        while (ordered := self._world.obey()[0]) != "work":
            if ordered == "want":
                self.obey(ordered)
        self.obey(ordered)

    def take(
        self, wait: Callable[[], None], learner: ModelLearner | None = None, sender: RankSender | None = None
    ) -> None:
        """Rank 0: until no other learner works, and guests sleep; then ``learner`` and ``sender``, which were resting,
        are on the devices, and those of the other ranks. ``wait`` is called meanwhile. Raises `TurnError`."""
        if not self._turn.leads():
            self._world.order("want")  # or guests would wake on the other devices between two learners' turns

            def waiting() -> None:
                wait()
                self._world.keep_awake()

            self._turn.queue(waiting)
        self._world.order("work")
        self._turn.take(wait)
        self._begin(learner, sender)

    def give(self, learner: ModelLearner, sender: RankSender | None = None) -> None:
        """Rank 0: all ranks rest, and others may use the devices."""
        self._world.order("rest")
        self._end(learner, sender)

    def obey(self, ordered: Order, learner: ModelLearner | None = None, sender: RankSender | None = None) -> None:
        """A rank beside rank 0: what `take` and `give` order. Raises `TurnError`."""
        if ordered == "want":
            self._turn.want()
        elif ordered == "work":
            self._turn.take()
            self._begin(learner, sender)
        elif ordered == "rest" and learner:
            self._end(learner, sender)

    def remind(self) -> None:
        """While it rests: guests may begin."""
        if self.resting:
            self._turn.remind()

    def _begin(self, learner: ModelLearner | None, sender: RankSender | None) -> None:
        """Once all ranks have taken their devices."""
        if learner:
            self._room.wait(health.beat)
        self._world.meet(self._patience_s)
        if learner:
            learner.wake()
        if sender:
            sender.wake()
        self.resting = False

    def _end(self, learner: ModelLearner, sender: RankSender | None) -> None:
        if sender:
            sender.rest()
        learner.rest()
        self._world.meet(self._patience_s)
        self._turn.give()
        self.resting = True
