"""Config sections of the trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.services.learning.config import LearnerConfig
from penstock.services.trainer.algorithm_config import AlgorithmConfig


class TrainerConfig(LearnerConfig):
    """The trainer."""

    ranks: int = Field(1, ge=1)
    """Processes on this machine that share the model by FSDP2, under torchrun; on GPUs one each. Across machines, run
    `penstock serve trainer` under a torchrun of your own."""
    steps: int = Field(100, ge=0)
    """Training steps; each yields a version. 0: the model is evaluated, and nothing is trained."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """What is learned from the rewards: an advantage, a loss and a correction that compose. Defaults: GRPO. See
    docs/algorithms.md."""
    max_consecutive_skipped: int = Field(5, ge=1)
    """So many steps in a row whose loss or gradient is not finite (such a step changes no weight) end the run with an
    error."""
    mismatch_warning: float = Field(0.05, gt=0)
    """A step whose KL between the engines' log-probabilities and the trainer's (k3 estimate, nats a token) is above
    this is warned of. See docs/engines.md."""
    sum_gradients: Literal["auto", "micro_batch", "step"] = "auto"
    """When several ranks sum their gradients: after each ``micro_batch``, which needs the least memory; or once a
    ``step``, for which each rank keeps the gradient of the whole model in fp32 (4 bytes a parameter). ``auto``: once a
    step where that takes at most a fifth of the memory that is free. The result is the same, up to rounding."""
