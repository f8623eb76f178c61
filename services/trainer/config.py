"""Config sections of the trainer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.services.runtime.settings import Section


class GroupAdvantage(Section):
    """GRPO's: rewards standardised within the group (Shao et al. 2024); without `std`, Dr. GRPO's (Liu et al. 2025)."""

    type: Literal["grpo"] = "grpo"
    std: bool = True
    """Divide by the group's standard deviation."""


class CustomFunction(Section):
    """A function of your own, with the signature of the built-in ones."""

    type: Literal["custom"] = "custom"
    function: str
    """``module:function``"""
    options: dict[str, Any] = {}


class ClippedLoss(Section):
    """PPO's clipped surrogate (Schulman et al. 2017), asymmetric (Yu et al. 2025), with dual clip (Ye et al. 2020)."""

    type: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(0.2, ge=0)
    """The ratio is kept above 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio is kept below 1 + clip_high."""
    dual_clip: float = Field(3.0, gt=1)
    """For negative advantages the token loss is at most this times the advantage's size."""


class NoCorrection(Section):
    """No importance weights."""

    type: Literal["none"] = "none"


class TruncatedCorrection(Section):
    """Token importance weights, truncated from above (Yao et al. 2025)."""

    type: Literal["truncated"] = "truncated"
    upper: float = Field(2.0, gt=0)
    normalize: bool = False
    """Divide the weights by their mean."""


class KLConfig(Section):
    """The penalty for leaving the reference model."""

    coefficient: float = Field(0.0, ge=0)
    """0: no penalty, and no reference process."""
    kind: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Estimator (Schulman 2020)."""
    gradient: Literal["own", "k2"] = "own"
    """``k2``: keep the value, but use the gradient of k2."""


AdvantageConfig = Annotated[GroupAdvantage | CustomFunction, Field(discriminator="type")]
LossConfig = Annotated[ClippedLoss | CustomFunction, Field(discriminator="type")]
CorrectionConfig = Annotated[NoCorrection | TruncatedCorrection | CustomFunction, Field(discriminator="type")]


class AlgorithmConfig(Section):
    """Three choices that compose: an advantage, a policy loss, a correction for off-policy data. Defaults: GRPO."""

    advantage: AdvantageConfig = GroupAdvantage()
    loss: LossConfig = ClippedLoss()
    correction: CorrectionConfig = NoCorrection()
    ratio: Literal["behaviour", "proximal"] = "behaviour"
    """Denominator of the loss's ratio: the log-probabilities of the policy that sampled (``behaviour``), or those of
    the policy that the step starts from (``proximal``; Hilton et al. 2022). With ``proximal``, take the truncated
    correction; ``behaviour`` holds that ratio already, and both together would count it twice. See
    docs/algorithms.md."""
    kl: KLConfig = KLConfig()
    aggregation: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"
    ] = "token-mean"
    length_scale: float | None = Field(None, gt=0)
    """Divisor of ``seq-mean-token-sum-norm``."""


class OptimizerConfig(Section):
    """AdamW."""

    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, down to `final_lr_share` at the last step."""
    final_lr_share: float = Field(0.0, ge=0, le=1)
    max_grad_norm: float = Field(1.0, gt=0)


class CheckpointConfig(Section):
    """Checkpoints in the transformers layout, with the trainer's own state beside them."""

    every: int = Field(50, ge=1)
    """Steps between checkpoints; the last step always has one."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""


class TrainerConfig(Section):
    """The trainer."""

    ranks: int = Field(1, ge=1)
    """Processes on this machine that share the model by FSDP2, under torchrun; on GPUs one each. Across machines, run
    `penstock serve trainer` under a torchrun of your own."""
    steps: int = Field(100, ge=1)
    """Training steps; each yields a version."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mismatch_warning: float = Field(0.05, gt=0)
    """A step whose KL between the engines' log-probabilities and the trainer's (k3 estimate, nats a token) is above
    this is warned of. See docs/engines.md."""
    tokens_per_micro_batch: int = Field(8192, ge=1)
    """Padded tokens of one forward and backward pass."""
    gradient_checkpointing: bool = False
    device: str = "auto"
    threads: int = Field(1, ge=1)
    """Compute threads of each rank."""
