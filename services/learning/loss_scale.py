"""How much losses are multiplied by where gradients are fp16: their numbers, whose range ends at 65,504 and at 6e-8,
would be lost below it (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from penstock.services.modeling.parallel.fsdp import local
from penstock.services.modeling.parallel.world import World

FIRST, LEAST = 2.0**16, 1.0
GROWS_AFTER = 400
"""Updates one after the other whose gradient had room: the next one is tried with twice the scale."""
TRIES = 6
"""An update is computed with half the scale, so often at most in all: its experience is worth more than that."""
SCALE, ROOM = "loss_scale", "loss_scale/updates"


class LossScale:
    """A power of 2, in the learner's ``state``, so that a redo has it; 1 where none is ``used``."""

    def __init__(self, state: dict[str, float], used: bool) -> None:
        self._state, self.used = state, used

    @property
    def value(self) -> float:
        """What losses are multiplied by."""
        return self._state.get(SCALE, FIRST) if self.used else 1.0

    def fall(self, value: float) -> None:
        """To half of ``value``: a gradient had no room."""
        self._state[SCALE], self._state[ROOM] = max(LEAST, value / 2), 0.0

    def take_off(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Gradients are as of the loss itself again."""
        if mine := _gradients(parameters):
            torch._foreach_mul_(mine, 1 / self.value)

    def undo(self, parameters: Iterable[torch.nn.Parameter], world: World) -> bool:
        """`take_off`, on all ranks; False: some number of a gradient had no room, and the scale falls."""
        parameters = [*parameters]
        mine = _gradients(parameters)
        whole = torch.stack(torch._foreach_norm(mine)).sum().isfinite() if mine else torch.tensor(True)
        if world.max(float(~whole)):
            self.fall(self.value)
            return False
        self.take_off(parameters)
        updates = self._state.get(ROOM, 0.0) + 1
        grown = updates >= GROWS_AFTER
        self._state[SCALE], self._state[ROOM] = self.value * (1 + grown), 0.0 if grown else updates
        return True


def _gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
