"""A critic in virtual time: it takes the trainer's steps, gives their values, and learns, while the trainer does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.pipeline.simulate.clock import Clock
from penstock.pipeline.simulate.costs import Costs


class Critic:
    """``changed`` is called when a step has its values, and when the next one may be taken; ``works`` is told when it
    begins (True) or ends its work on one."""

    def __init__(
        self,
        clock: Clock,
        costs: Costs,
        changed: Callable[[], None],
        works: Callable[[bool], None] = lambda begins: None,
    ) -> None:
        self._clock, self._costs, self._changed, self._works = clock, costs, changed, works
        self.version = 0
        """Steps that it has learned from; the next one to take."""
        self.valued = 0
        """Steps that have their values."""
        self.idle = True
        self.busy_s = 0.0

    def take(self, tokens: int) -> None:
        """The next step, of so many tokens."""
        self.idle = False
        self._works(True)
        self._clock.begins()
        self._work(tokens * self._costs.critic_values_token_s, partial(self._values, tokens))

    def _values(self, tokens: int) -> None:
        self.valued += 1
        self._work(tokens * self._costs.critic_train_token_s, self._learned)
        self._changed()

    def _learned(self) -> None:
        self._clock.ends()
        self._works(False)
        self.version += 1
        self.idle = True
        self._changed()

    def _work(self, seconds: float, then: Callable[[], None]) -> None:
        self.busy_s += seconds
        self._clock.after_work(seconds, then)
