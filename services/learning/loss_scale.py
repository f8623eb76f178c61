"""How much losses are multiplied by where gradients are fp16: their numbers, whose range ends at 65,504 and at 6e-8,
would be lost below it (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterable

import structlog
import torch

from penstock.services.modeling.parallel.fsdp import local
from penstock.services.modeling.parallel.world import World

log = structlog.get_logger()

FIRST = 2.0**16
GROWS_AFTER = 400
"""Updates one after the other whose gradient had room: the next one is tried with twice the scale."""
TRIES = 6
"""An update is computed again with half the scale, so often at most: its experience is worth more than that."""
SCALE, ROOM = "loss_scale", "loss_scale/updates"


class LossScale:
    """A power of 2, in the learner's ``state``, so that a redo has it; 1 where none is ``used``."""

    def __init__(self, state: dict[str, float], used: bool) -> None:
        self._state, self.used = state, used

    @property
    def value(self) -> float:
        """What losses are multiplied by."""
        return self._state.get(SCALE, FIRST) if self.used else 1.0

    def undo(self, parameters: Iterable[torch.nn.Parameter], world: World) -> bool:
        """Gradients are as of the loss itself again, on all ranks; False: some number of them had no room, and the
        scale is half of what it was."""
        mine = [local(p.grad) for p in parameters if p.grad is not None]
        whole = torch.stack(torch._foreach_norm(mine)).sum().isfinite() if mine else torch.tensor(True)
        if world.max(float(~whole)):
            self._state[SCALE], self._state[ROOM] = self.value / 2, 0.0
            return False
        if mine:
            torch._foreach_mul_(mine, 1 / self.value)
        updates = self._state.get(ROOM, 0.0) + 1
        grown = updates >= GROWS_AFTER
        self._state[SCALE], self._state[ROOM] = self.value * (1 + grown), 0.0 if grown else updates
        return True
