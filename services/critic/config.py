"""Config section of the critic."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from penstock.services.learning.config import LearnerConfig
from penstock.services.learning.optimizer_config import OptimizerConfig


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW or Muon: how its weights are changed."""

    lr: float = Field(1e-5, gt=0)
    """Learning rate after the warm-up, e.g. ``2.0e-05``, commonly ten times the policy's; of both, where there are
    two."""


def shares_devices(config: Any) -> bool:
    """Of a whole config: with `run.placement`: colocated the critic is on the trainer's devices."""
    critic, on_cpu = config.critic, [each.device == "cpu" for each in (config.critic, config.trainer)]
    return config.with_critic and not critic.own_gpus and on_cpu[0] == on_cpu[1]


class CriticConfig(LearnerConfig):
    """The critic: a model that says of each token what is still to be won (`advantage: gae`), or a language model that
    says what it was worth (`advantage: prime`); there is none where nothing reads either."""

    path: str | None = None
    """The model that it starts from, e.g. ``Qwen/Qwen2.5-0.5B``; null: the policy's own. The head of a model of values,
    one number a token, starts at 0 where the model has none."""
    own_gpus: bool = False
    """Whether it has GPUs of its own also with `run.placement`: colocated, e.g. ``true``; false: it is on the trainer's
    then, and the two take turns. See docs/memory.md."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the critic learns and the policy stands still, e.g. ``10``: a policy that follows a critic which
    knows nothing yet unlearns. The policy's learning rate warms up behind them."""
    clip: float = Field(0.2, gt=0)
    """Of a model of values: one moves by at most so much in a step; beyond, the loss has no gradient (Schulman et al.
    2017)."""
    epochs: int = Field(1, ge=1)
    """How often a step's groups are learned from, e.g. ``2``; where nothing is said, as often as `trainer.epochs`."""
    mini_batches: int = Field(1, ge=1)
    """Updates in an epoch, e.g. ``4``: the step's groups are dealt into so many parts, each an optimizer step. Where
    nothing is said, as many as `trainer.mini_batches`."""
    gamma: float | None = Field(None, ge=0, le=1)
    """Of a model of values: discount a token of the returns that it learns, e.g. ``0.99``; null: the advantage's own,
    or 1."""
    lam: float | None = Field(None, ge=0, le=1)
    """Of a model of values: λ of the returns that it learns, e.g. ``1.0`` while the advantage has 0.95 (VC-PPO,
    arXiv:2503.01491); null: the advantage's own, or 1."""
    beta: float = Field(0.05, gt=0)
    """Of PRIME's: what a nat is worth that it finds a token likelier than the reference does, e.g. ``0.1``."""
    right: float = 0.5
    """Of PRIME's: an answer is right from this reward on, as it is, whatever `trainer.algorithm.reward_shape` makes of
    it, e.g. ``1.0``."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """AdamW or Muon: how its weights are changed."""
