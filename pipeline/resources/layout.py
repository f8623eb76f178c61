"""One way to lay a run out, and how long a step would take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.pipeline.config import Config
from penstock.services.rollout.config import VLLM_DEFAULT
from penstock.services.trainer.config import TrainerConfig


@dataclass(frozen=True)
class Layout:
    """One way to lay a run out."""

    trainer: TrainerConfig
    trainer_gib: float
    train_s: float
    """Seconds of a step that the trainer takes; and that all rollouts together take."""
    generate_s: float
    rollouts: int
    tensor_parallel: int
    """GPUs of one rollout's engine."""
    faster: TrainerConfig | None
    """The fastest shape of so many ranks, where that does not fit; and what it would hold and take."""
    faster_gib: float
    faster_s: float
    colocated: bool = False
    """Rollouts are on the trainer's GPUs."""
    share: float = VLLM_DEFAULT
    """Of a GPU's memory that an engine may take."""
    switch_s: float = 0.0
    """Until GPUs have changed hands, twice."""
    values_s: float = 0.0
    """Until a critic has said its values; and more, until it has learned from the step, beside whatever follows."""
    critic_s: float = 0.0
    critic_in_turn: bool = False
    """It is on the trainer's GPUs, too."""
    references: int = 0
    """Processes of the reference; and what all of them together take."""
    reference_s: float = 0.0

    @property
    def step_s(self) -> float:
        """While one step is trained on the next is generated and scored, but for who shares GPUs, and gets its
        values."""
        if self.critic_in_turn:
            return self.synchronous_s
        longest = self._in_turn_s if self.colocated else max(self.train_s, self.generate_s, self.reference_s)
        return max(longest, self.values_s + self.critic_s)

    @property
    def synchronous_s(self) -> float:
        """With gate.max_lag=0: one after the other."""
        if self.critic_in_turn:
            return self.values_s + self.critic_s + self._in_turn_s
        return self.values_s + max(self._in_turn_s, self.critic_s)

    @property
    def _in_turn_s(self) -> float:
        """But for a critic."""
        return self.train_s + self.generate_s + self.reference_s + self.switch_s


def seconds_of(config: Config) -> Callable[[Layout], float]:
    """What a step of ``config`` takes in a layout."""
    return lambda layout: layout.step_s if config.gate.max_lag else layout.synchronous_s
