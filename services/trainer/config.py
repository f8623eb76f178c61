"""Config sections of the trainer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.services.runtime.settings import Section

GRADIENT_SHARE = 0.2
"""Of the memory that is free before the first step: so much may whole gradients take (`sum_gradients`: ``auto``)."""


class GroupAdvantage(Section):
    """GRPO's: rewards standardised within the group (Shao et al. 2024); without `std`, Dr. GRPO's (Liu et al. 2025)."""

    type: Literal["grpo"] = "grpo"
    std: bool = True
    """Divide by the group's standard deviation; false: as Dr. GRPO does."""


class CustomFunction(Section):
    """A function of your own. Its arguments and what it returns: docs/extending.md."""

    type: Literal["custom"] = "custom"
    function: str
    """Where it is: module and function, e.g. ``my_module:my_function``."""
    columns: list[str] = []
    """Columns that it reads, e.g. ``[surprise]``: each is an argument of that name (``reward/brief`` as
    ``reward_brief``), aligned with the others, for a loss or correction ``[rows, length]`` (one value a trajectory:
    ``[rows, 1]``), for an advantage ``[rows]``."""
    options: dict[str, Any] = {}
    """What the function is called with besides, e.g. ``{scale: 0.5}``."""


class ClippedLoss(Section):
    """PPO's clipped surrogate (Schulman et al. 2017), asymmetric (Yu et al. 2025), with dual clip (Ye et al. 2020)."""

    type: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(0.2, ge=0)
    """The ratio is kept above 1 - clip_low, e.g. ``0.1``."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio is kept below 1 + clip_high, e.g. ``0.28``."""
    dual_clip: float = Field(3.0, gt=1)
    """For negative advantages the token loss is at most this times the advantage's size."""


class NoCorrection(Section):
    """No importance weights."""

    type: Literal["none"] = "none"


class TruncatedCorrection(Section):
    """Token importance weights, truncated from above (Yao et al. 2025)."""

    type: Literal["truncated"] = "truncated"
    upper: float = Field(2.0, gt=0)
    """Largest weight that a token can have."""
    normalize: bool = False
    """Divide the weights by their mean."""


class KLConfig(Section):
    """The penalty for leaving the reference model."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the penalty, e.g. ``0.001``; 0: none, and no reference process."""
    kind: Literal["k1", "abs", "k2", "k3"] = "k3"
    """How the divergence is estimated from the sampled tokens (Schulman 2020). See docs/algorithms.md."""
    gradient: Literal["own", "k2"] = "own"
    """``own``: the gradient of the estimate itself. ``k2``: keep its value, but use the gradient of k2."""


AdvantageConfig = Annotated[GroupAdvantage | CustomFunction, Field(discriminator="type")]
LossConfig = Annotated[ClippedLoss | CustomFunction, Field(discriminator="type")]
CorrectionConfig = Annotated[NoCorrection | TruncatedCorrection | CustomFunction, Field(discriminator="type")]


class AlgorithmConfig(Section):
    """Three choices that compose: an advantage, a policy loss, a correction for off-policy data. Defaults: GRPO."""

    advantage: AdvantageConfig = GroupAdvantage()
    """How much better than expected a trajectory was."""
    loss: LossConfig = ClippedLoss()
    """What the optimizer makes small, from advantages and log-probabilities."""
    correction: CorrectionConfig = NoCorrection()
    """Weights for tokens that another policy than the trainer's sampled."""
    ratio: Literal["behaviour", "proximal"] = "behaviour"
    """Denominator of the loss's ratio: the log-probabilities of the policy that sampled (``behaviour``), or those of
    the policy that the step starts from (``proximal``; Hilton et al. 2022). With ``proximal``, take the truncated
    correction; ``behaviour`` holds that ratio already, and both together would count it twice. See
    docs/algorithms.md."""
    kl: KLConfig = KLConfig()
    """A penalty for leaving the reference model."""
    aggregation: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"
    ] = "token-mean"
    """How the losses of tokens become one number: the mean over all tokens of a step, or sums or means of each
    trajectory first. See docs/algorithms.md."""
    length_scale: float | None = Field(None, gt=0)
    """Divisor of ``seq-mean-token-sum-norm``, which needs it, e.g. ``256`` (`rollout.sampling.max_new_tokens` is a good
    value); null: none."""


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
