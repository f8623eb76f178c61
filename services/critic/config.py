"""Config section of the critic."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.services.learning.config import CheckpointConfig, OptimizerConfig
from penstock.services.runtime.settings import Section


class CriticConfig(Section):
    """The critic; there is none where nothing reads its column ``values``."""

    path: str | None = None
    """The model that it starts from, e.g. ``Qwen/Qwen2.5-0.5B``; null: the policy's own. Its head, one number a token,
    starts at 0 where the model has none."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the critic learns and the policy stands still, e.g. ``10``: a policy that follows a critic which
    knows nothing yet unlearns."""
    clip: float = Field(0.2, gt=0)
    """A value moves by at most so much in a step: beyond, the loss has no gradient (Schulman et al. 2017)."""
    gamma: float | None = Field(None, ge=0, le=1)
    """Discount a token of the returns that it learns, e.g. ``0.99``; null: the advantage's own, or 1."""
    lam: float | None = Field(None, ge=0, le=1)
    """λ of the returns that it learns, e.g. ``1.0`` while the advantage has 0.95 (VC-PPO, arXiv:2503.01491); null: the
    advantage's own, or 1."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """AdamW: how its weights are changed. Its learning rate is commonly ten times the policy's."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When it is saved. Groups are kept until trainer and critic both have a checkpoint that covers them."""
    epochs: int = Field(1, ge=1)
    """How often a step's groups are learned from, e.g. ``2``: PPO's epochs. The lag of a token is counted in steps, so
    more of them go beyond what it bounds; the clip holds them back."""
    mini_batches: int = Field(1, ge=1)
    """Updates in an epoch, e.g. ``4``: the step's groups are dealt into so many parts, each an optimizer step."""
    tokens_per_micro_batch: int = Field(8192, ge=1)
    """Tokens of one forward and backward pass, padding included; fewer need less memory, the result is the same."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more time."""
    device: str = "auto"
    """Where it computes, e.g. ``cpu`` or ``cuda``; ``auto``: a GPU where there is one."""
    threads: int = Field(1, ge=1)
    """Compute threads."""

    @property
    def sum_gradients(self) -> Literal["step"]:
        """It is one process: there is nobody to sum with."""
        return "step"
