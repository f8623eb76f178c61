"""A running mean of the weights that are trained: a teacher that follows its pupil slowly.

It lies in the optimizer's state, a tensor more for each parameter, cut as that is: checkpoints have it, whoever resumes
on another number of ranks takes the part that is its own, and a redo arrives at the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from penstock.services.learning.checkpoint import AVERAGE
from penstock.services.learning.optimizer import state_names
from penstock.services.modeling.parallel.fsdp import local


class WeightAverage:
    """Of ``parameters``; ``rate`` is how far it goes towards them after each step: 0, never."""

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, rate: float
    ) -> None:
        self._parameters, self._optimizer, self._rate = parameters, optimizer, rate
        self._first: dict[str, torch.Tensor] = {}
        """Before the optimizer has a state to lie in."""

    @property
    def first(self) -> list[torch.Tensor]:
        """What does not lie in the optimizer's state yet."""
        return [*self._first.values()]

    def begin(self) -> None:
        """Before a step: where there is no average yet, it is what the parameters are."""
        for name, parameter in self._parameters.items():
            if AVERAGE not in self._optimizer.state.get(parameter, {}) and name not in self._first:
                self._first[name] = parameter.detach().clone()

    def follow(self) -> None:
        """After a step."""
        for name, parameter in self._parameters.items():
            state = self._optimizer.state[parameter]
            if not state and state_names(self._optimizer, parameter):  # no update has changed it yet
                continue
            if AVERAGE not in state:
                state[AVERAGE] = self._first.pop(name)
            local(state[AVERAGE]).lerp_(local(parameter), self._rate)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Meanwhile the parameters are the average. Nobody else may read them."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        """By values: what cuts a model over ranks holds on to its parameters' memory."""
        for name, parameter in self._parameters.items():
            average = self._optimizer.state.get(parameter, {}).get(AVERAGE, self._first.get(name))
            if average is not None:
                one, other = local(parameter), local(average)
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)
