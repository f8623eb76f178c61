"""Config sections that every learner has."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.services.runtime.settings import Section

GRADIENT_SHARE = 0.2
"""Of the memory that is free before the first step: so much may whole gradients take (`sum_gradients`: ``auto``)."""


class OptimizerConfig(Section):
    """AdamW."""

    lr: float = Field(1e-6, gt=0)
    """Learning rate after the warm-up, e.g. ``1.0e-05``."""
    betas: tuple[float, float] = (0.9, 0.95)
    """How slowly AdamW's two running means forget: of the gradient, and of its square, e.g. ``[0.9, 0.999]``."""
    eps: float = Field(1e-8, gt=0)
    """Added to AdamW's divisor, so that it is never 0."""
    weight_decay: float = Field(0.0, ge=0)
    """How strongly weights are drawn towards 0, as a multiple of the learning rate, e.g. ``0.01``; 0: not."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from near 0 to `lr`, e.g. ``10``."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up: it stays, or falls to `final_lr_share` of itself by the last step."""
    final_lr_share: float = Field(0.0, ge=0, le=1)
    """Share of the learning rate that is left at the last step, e.g. ``0.1``."""
    max_grad_norm: float = Field(1.0, gt=0)
    """A gradient that is longer than this (2-norm over all parameters) is scaled down to it."""


class CheckpointConfig(Section):
    """Checkpoints in the transformers layout, with the trainer's own state beside them."""

    every: int = Field(50, ge=1)
    """Steps between checkpoints; the last step always has one."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
