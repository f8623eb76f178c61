"""Config sections of the trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.services.learning.config import CheckpointConfig, OptimizerConfig
from penstock.services.runtime.settings import Section
from penstock.services.trainer.algorithm_config import AlgorithmConfig


class TrainerConfig(Section):
    """The trainer."""

    ranks: int = Field(1, ge=1)
    """Processes on this machine that share the model by FSDP2, under torchrun; on GPUs one each. Across machines, run
    `penstock serve trainer` under a torchrun of your own."""
    steps: int = Field(100, ge=1)
    """Training steps; each yields a version."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """What is learned from the rewards: an advantage, a loss and a correction that compose. Defaults: GRPO. See
    docs/algorithms.md."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW: how the weights are changed."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the model is saved, in transformers' layout, with the trainer's own state beside it."""
    max_consecutive_skipped: int = Field(5, ge=1)
    """So many steps in a row whose loss or gradient is not finite (such a step changes no weight) end the run with an
    error."""
    mismatch_warning: float = Field(0.05, gt=0)
    """A step whose KL between the engines' log-probabilities and the trainer's (k3 estimate, nats a token) is above
    this is warned of. See docs/engines.md."""
    epochs: int = Field(1, ge=1)
    """How often a step's groups are learned from, e.g. ``2``: PPO's epochs. The lag of a token is counted in steps, so
    more of them go beyond what it bounds; the clip holds them back."""
    mini_batches: int = Field(1, ge=1)
    """Updates in an epoch, e.g. ``4``: the step's groups are dealt into so many parts, each an optimizer step."""
    tokens_per_micro_batch: int = Field(8192, ge=1)
    """Tokens of one forward and backward pass, padding included; fewer need less memory, the result is the same."""
    sum_gradients: Literal["auto", "micro_batch", "step"] = "auto"
    """When several ranks sum their gradients: after each ``micro_batch``, which needs the least memory; or once a
    ``step``, for which each rank keeps the gradient of the whole model in fp32 (4 bytes a parameter). ``auto``: once a
    step where that takes at most a fifth of the memory that is free. The result is the same, up to rounding."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more time."""
    device: str = "auto"
    """Where it computes, e.g. ``cpu`` or ``cuda``; ``auto``: a GPU where there is one."""
    threads: int = Field(1, ge=1)
    """Compute threads of each rank."""
