"""Config sections of the built-in policy losses. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from penstock.protocols.columns import PICKED
from penstock.services.trainer.choice import Choice


class ClippedLoss(Choice):
    """PPO's clipped surrogate, asymmetric, with dual clip."""

    implementation = "losses.ppo_clip:ppo_clip"
    paper = "Schulman et al. 2017, arXiv:1707.06347; Yu et al. 2025, arXiv:2503.14476; Ye et al. 2020, arXiv:1912.09729"
    clips_tokens = True
    type: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(0.2, ge=0)
    """The ratio is kept above 1 - clip_low, e.g. ``0.1``."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio is kept below 1 + clip_high, e.g. ``0.28``."""
    dual_clip: float | None = Field(3.0, gt=1)
    """For negative advantages the token loss is at most this times the advantage's size; null: not bounded, as in the
    papers of PPO, GRPO and DAPO, e.g. ``10.0``."""
    lag_exponent: float = Field(0.0, ge=0)
    """The clip's width for a token that is l versions old is multiplied by (1 + l) to the power of minus this, e.g.
    ``0.5``: what is older may move less; 0: all alike."""

    @property
    def reads_lags(self) -> bool:
        """Where age matters."""
        return self.lag_exponent > 0


class ReinforceLoss(Choice):
    """The plain policy gradient, weighted by the correction. GPG's loss too."""

    implementation = "losses.reinforce:reinforce"
    paper = "Williams 1992; Chu et al. 2025, arXiv:2504.02546"
    has_ratio = False
    type: Literal["reinforce"] = "reinforce"


class GspoLoss(Choice):
    """GSPO: the ratio of a whole sequence (its geometric mean), clipped."""

    implementation = "losses.gspo:gspo"
    paper = "Zheng et al. 2025, arXiv:2507.18071"
    aggregation = "seq-mean-token-mean"
    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, ge=0)
    """The sequence's ratio is kept above 1 - clip_low; far narrower than for tokens, e.g. ``0.0002``."""
    clip_high: float = Field(4e-4, ge=0)
    """The sequence's ratio is kept below 1 + clip_high, e.g. ``0.0005``."""


class CispoLoss(Choice):
    """CISPO: the clipped ratio is a constant weight, so that no token loses its gradient."""

    implementation = "losses.cispo:cispo"
    paper = "MiniMax 2025, arXiv:2506.13585"
    clips_tokens = True
    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(1.0, ge=0, le=1)
    """The weight is kept above 1 - clip_low; 1: no bound below, e.g. ``0.8``."""
    clip_high: float = Field(2.0, ge=0)
    """The weight is kept below 1 + clip_high, e.g. ``0.28``."""


class SapoLoss(Choice):
    """SAPO: a smooth gate in the place of a clip, steeper for negative advantages."""

    implementation = "losses.sapo:sapo"
    paper = "Gao et al. 2025, arXiv:2511.20347"
    aggregation = "seq-mean-token-mean"
    type: Literal["sapo"] = "sapo"
    tau_pos: float = Field(1.0, gt=0)
    """Steepness for advantages above 0, e.g. ``2.0``."""
    tau_neg: float = Field(1.05, gt=0)
    """Steepness for all others, e.g. ``2.5``."""


class GeoMeanLoss(Choice):
    """GMPO: the geometric mean of a sequence's token ratios, each clipped."""

    implementation = "losses.geo_mean:geo_mean"
    paper = "Zhao et al. 2025, arXiv:2507.20673"
    aggregation = "seq-mean-token-mean"
    type: Literal["geo_mean"] = "geo_mean"
    clip_low: float = Field(0.4, ge=0)
    """A token's log-ratio is kept above -clip_low, e.g. ``0.3``."""
    clip_high: float = Field(0.4, ge=0)
    """A token's log-ratio is kept below clip_high, e.g. ``0.5``."""


class DppoTvLoss(Choice):
    """DPPO: a token whose probability has moved too far loses its gradient, not one whose ratio has."""

    implementation = "losses.dppo:dppo_tv"
    paper = "DPPO 2026, arXiv:2602.04879"
    type: Literal["dppo_tv"] = "dppo_tv"
    threshold_low: float = Field(0.15, ge=0)
    """By how much the probability may fall where the advantage is not positive, e.g. ``0.2``."""
    threshold_high: float = Field(0.15, ge=0)
    """By how much it may rise where the advantage is positive, e.g. ``0.2``."""
    ratio_cap: float = Field(20.0, gt=0)
    """Largest ratio that weighs a token."""


class DppoKlLoss(DppoTvLoss):
    """DPPO, by the divergence of the two outcomes "this token" and "any other"."""

    implementation = "losses.dppo:dppo_kl"
    type: Literal["dppo_kl"] = "dppo_kl"  # type: ignore[assignment]
    threshold_low: float = Field(0.05, ge=0)
    """Largest divergence, in nats, where the advantage is not positive, e.g. ``0.02``."""
    threshold_high: float = Field(0.05, ge=0)
    """Largest divergence, in nats, where it is positive, e.g. ``0.02``."""


class DroLoss(Choice):
    """DRO: the policy gradient with a quadratic penalty on the log-ratio."""

    implementation = "losses.dro:dro"
    paper = "Richemond et al. 2024, arXiv:2405.19107"
    type: Literal["dro"] = "dro"
    beta: float = Field(0.1, ge=0)
    """Weight of the penalty."""


class ClipCovLoss(Choice):
    """Clip-Cov: PPO's clip, and some tokens whose advantage and probability go together most lose their loss, which
    keeps the entropy up."""

    implementation = "losses.clip_cov:clip_cov"
    picks_by = "losses.clip_cov:pick"
    given = (PICKED,)
    paper = "Cui et al. 2025, arXiv:2505.22617"
    clips_tokens = True
    type: Literal["clip_cov"] = "clip_cov"
    clip_low: float = Field(0.2, ge=0)
    """The ratio is kept above 1 - clip_low, e.g. ``0.1``."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio is kept below 1 + clip_high, e.g. ``0.28``."""
    cov_low: float = Field(1.0)
    """Tokens whose covariance is larger may be picked, e.g. ``0.5``."""
    cov_high: float = Field(5.0)
    """Those whose covariance is larger than this are left alone."""
    drop_fraction: float = Field(2e-4, gt=0, le=1)
    """At most this share of an update's tokens is picked; at least one may be."""

    @model_validator(mode="after")
    def _some_lie_between(self) -> ClipCovLoss:
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low={self.cov_low:g} is not below cov_high={self.cov_high:g}: none would be picked")
        return self

    def options(self) -> dict[str, Any]:
        """Of the loss itself."""
        return {"clip_low": self.clip_low, "clip_high": self.clip_high}

    def picking(self) -> dict[str, Any]:
        """Of the choice of tokens."""
        return self.model_dump(exclude={"type"})


class KlCovLoss(Choice):
    """KL-Cov: the plain ratio, and tokens whose advantage and probability go together most pay for moving."""

    implementation = "losses.kl_cov:kl_cov"
    picks_by = "losses.kl_cov:pick"
    given = (PICKED,)
    paper = "Cui et al. 2025, arXiv:2505.22617"
    type: Literal["kl_cov"] = "kl_cov"
    top_fraction: float = Field(2e-4, gt=0, le=1)
    """The share of an update's tokens that pay; at least one does."""
    kl_coef: float = Field(1.0, ge=0)
    """What they pay for each nat that they move, e.g. ``0.1``."""

    def options(self) -> dict[str, Any]:
        """Of the loss itself."""
        return {"kl_coef": self.kl_coef}

    def picking(self) -> dict[str, Any]:
        """Of the choice of tokens."""
        return {"top_fraction": self.top_fraction}


class M2poLoss(Choice):
    """M2PO: the plain ratio, and in the place of a clip the tokens that have gone furthest from the policy that sampled
    them, the way that their advantage pulls, lose their loss: as few as leave the others of these near enough to it in
    the mean. For old experience."""

    implementation = "losses.m2po:m2po"
    picks_by = "losses.m2po:pick"
    given = (PICKED,)
    paper = "Zheng et al. 2025, arXiv:2510.01161"
    type: Literal["m2po"] = "m2po"
    second_moment: float = Field(0.04, gt=0)
    """Largest mean of the squared log-ratios of those of an update's tokens that have gone that way, e.g. ``0.01``."""

    def options(self) -> dict[str, Any]:
        """Of the loss itself."""
        return {}

    def picking(self) -> dict[str, Any]:
        """Of the choice of tokens."""
        return {"second_moment": self.second_moment}


class ToprLoss(Choice):
    """TOPR: the plain policy gradient, in which what has a negative advantage counts the less the less likely the whole
    answer has become. For old experience."""

    implementation = "losses.topr:topr"
    paper = "Le Roux et al. 2025, arXiv:2503.14286"
    type: Literal["topr"] = "topr"
    upper: float = Field(1.0, gt=0)
    """Largest weight of an answer with a negative advantage, e.g. ``0.5``; all others have 1."""


class SppoLoss(Choice):
    """SPPO: the log-ratio of a whole answer is drawn to η times its advantage, by their squared difference."""

    implementation = "losses.sppo:sppo"
    paper = "Wu et al. 2024, arXiv:2405.00675"
    aggregation = "seq-mean-token-sum"
    type: Literal["sppo"] = "sppo"
    eta: float = Field(1.0, gt=0)
    """η: how far a step may go, e.g. ``10``: at 1 an answer whose advantage is 0.5 is to become e^0.5 times as
    likely."""


class VespoLoss(Choice):
    """VESPO: the policy gradient, weighted by a smooth function of the whole answer's ratio, which is 1 where policy
    and sampler agree and falls off on both sides. For old experience."""

    implementation = "losses.vespo:vespo"
    paper = "VESPO 2026, arXiv:2602.10693"
    type: Literal["vespo"] = "vespo"
    power_pos: float = Field(2.0, ge=0)
    """For advantages from 0 on: how fast the weight falls where the answer has become unlikely, e.g. ``1.0``."""
    decay_pos: float = Field(3.0, gt=0)
    """For advantages from 0 on: how fast the weight falls where the answer has become likelier, e.g. ``1.5``."""
    power_neg: float = Field(3.0, ge=0)
    """For negative advantages, as power_pos, e.g. ``4.0``."""
    decay_neg: float = Field(2.0, gt=0)
    """For negative advantages, as decay_pos, e.g. ``2.5``."""


BuiltInLoss = (
    ClippedLoss
    | ReinforceLoss
    | GspoLoss
    | CispoLoss
    | SapoLoss
    | GeoMeanLoss
    | DppoTvLoss
    | DppoKlLoss
    | DroLoss
    | ClipCovLoss
    | KlCovLoss
    | M2poLoss
    | ToprLoss
    | VespoLoss
    | SppoLoss
)
