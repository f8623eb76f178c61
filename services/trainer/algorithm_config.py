"""Config sections of `trainer.algorithm`: what can be chosen, with its options and its paper. Imports no torch.

A section names the function that it stands for; `services.trainer.algorithms.compose` finds it there.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from penstock.protocols.columns import VALUES
from penstock.services.runtime.settings import Section
from penstock.services.trainer.presets import PRESETS, PresetName, expand

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"]


class Traits(Section):
    """What the rest of the config wants to know of a choice, built in or not."""

    least_n: ClassVar[int] = 1
    """Of an advantage: fewer trajectories in a group teach nothing."""
    by_token: ClassVar[bool] = False
    """Of an advantage: it takes the reward of each token, not of the whole trajectory."""
    compares: ClassVar[bool] = True
    """Of an advantage: a group whose rewards are all equal teaches nothing."""
    aggregation: ClassVar[Aggregation] = "token-mean"
    """Of a loss: how its authors make one number of its tokens."""
    has_ratio: ClassVar[bool] = True
    """Of a loss: it holds the ratio of the policy to the one that sampled, or that the step starts from."""


class Choice(Traits):
    """One of the built-in ones."""

    implementation: ClassVar[str] = ""
    """``package.module:function`` below `services.trainer.algorithms`; empty: there is nothing to compute."""
    paper: ClassVar[str] = ""

    @property
    def columns(self) -> list[str]:
        """Columns of experience that it reads, beside the reward."""
        return []

    def options(self) -> dict[str, Any]:
        """What its function is called with besides."""
        return self.model_dump(exclude={"type"})


# --- advantages ------------------------------------------------------------------------------------------------------


class GroupAdvantage(Choice):
    """Rewards standardised within the group; without `std`, Dr. GRPO's."""

    implementation = "advantages.grpo:grpo"
    paper = "Shao et al. 2024, arXiv:2402.03300; Liu et al. 2025, arXiv:2503.20783"
    least_n = 2
    type: Literal["grpo"] = "grpo"
    std: bool = True
    """Divide by the group's standard deviation; false: as Dr. GRPO does."""


class LeaveOneOutAdvantage(Choice):
    """RLOO: the reward, less the mean of the group's other members."""

    implementation = "advantages.rloo:rloo"
    paper = "Ahmadian et al. 2024, arXiv:2402.14740"
    least_n = 2
    type: Literal["rloo"] = "rloo"


class GaeAdvantage(Choice):
    """PPO's: generalized advantage estimates from a critic's values, whitened over all tokens of the step. Needs no
    group; starts a critic process (`critic`)."""

    implementation = "advantages.gae:gae"
    paper = "Schulman et al. 2015, arXiv:1506.02438; Schulman et al. 2017, arXiv:1707.06347"
    compares = False
    by_token = True
    type: Literal["gae"] = "gae"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount a token: how much less a reward counts for a token the further off it is, e.g. ``0.99``."""
    lam: float = Field(1.0, ge=0, le=1)
    """λ: 1 trusts the reward alone, 0 the critic's value of the next token alone, e.g. ``0.95``."""

    @property
    def columns(self) -> list[str]:
        """The critic's values."""
        return [VALUES]


class ReinforcePlusPlusAdvantage(Choice):
    """REINFORCE++: returns, whitened over all tokens of the step. Needs no group."""

    implementation = "advantages.reinforce_plus_plus:reinforce_plus_plus"
    paper = "Hu et al. 2025, arXiv:2501.03262"
    compares = False
    by_token = True
    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount a token: how much less the reward counts for a token the further it is from the end."""


class ReinforcePlusPlusBaselineAdvantage(Choice):
    """REINFORCE++ with the group's mean as baseline, whitened over all tokens of the step."""

    implementation = "advantages.reinforce_plus_plus:reinforce_plus_plus_baseline"
    paper = "Hu et al. 2025, arXiv:2501.03262"
    least_n = 2
    type: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


class OpoAdvantage(Choice):
    """OPO: the reward, less the group's mean weighted by length, which has the least variance."""

    implementation = "advantages.opo:opo"
    paper = "Hao et al. 2025, arXiv:2505.23585"
    least_n = 2
    type: Literal["opo"] = "opo"


class GpgAdvantage(Choice):
    """GPG: the reward, less the group's mean, scaled up by the share of rewards that are not 0."""

    implementation = "advantages.gpg:gpg"
    paper = "Chu et al. 2025, arXiv:2504.02546"
    least_n = 2
    type: Literal["gpg"] = "gpg"
    f_norm: float = Field(1.0, gt=0)
    """Divisor of all advantages."""


class PassAtKAdvantage(Choice):
    """Only the best of a group counts, by how much it is better than the second best."""

    implementation = "advantages.grpo_passk:grpo_passk"
    paper = "Tang et al. 2025, arXiv:2503.19595"
    least_n = 2
    type: Literal["grpo_passk"] = "grpo_passk"
    normalize: bool = True
    """Divide by the group's standard deviation."""


class MaxRlAdvantage(Choice):
    """MaxRL: the reward, less the group's mean, divided by it: the likelihood of success is raised, not its rate. For
    rewards that are not negative."""

    implementation = "advantages.maxrl:maxrl"
    paper = "MaxRL 2026, arXiv:2602.02710"
    least_n = 2
    type: Literal["maxrl"] = "maxrl"


class GdpoAdvantage(Choice):
    """GDPO: several rewards, each standardised within the group before they are added."""

    implementation = "advantages.gdpo:gdpo"
    paper = "GDPO 2026, arXiv:2601.05242"
    least_n = 2
    type: Literal["gdpo"] = "gdpo"
    components: dict[str, float] = Field(min_length=1)
    """Weights of the reward's columns, e.g. ``{reward/exact_match: 1.0, reward/brief: 0.5}``."""

    @property
    def columns(self) -> list[str]:
        """The components."""
        return list(self.components)

    def options(self) -> dict[str, Any]:
        """Weights, in the order of the columns."""
        return {"weights": list(self.components.values())}


# --- policy losses ---------------------------------------------------------------------------------------------------


class ClippedLoss(Choice):
    """PPO's clipped surrogate, asymmetric, with dual clip."""

    implementation = "losses.ppo_clip:ppo_clip"
    paper = "Schulman et al. 2017, arXiv:1707.06347; Yu et al. 2025, arXiv:2503.14476; Ye et al. 2020, arXiv:1912.09729"
    type: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(0.2, ge=0)
    """The ratio is kept above 1 - clip_low, e.g. ``0.1``."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio is kept below 1 + clip_high, e.g. ``0.28``."""
    dual_clip: float = Field(3.0, gt=1)
    """For negative advantages the token loss is at most this times the advantage's size."""


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
    aggregation = "seq-mean-token-sum"
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
    threshold_low: float = Field(0.1, ge=0)
    """By how much the probability may fall where the advantage is not positive, e.g. ``0.2``."""
    threshold_high: float = Field(0.1, ge=0)
    """By how much it may rise where the advantage is positive, e.g. ``0.2``."""
    ratio_cap: float = Field(20.0, gt=0)
    """Largest ratio that weighs a token."""


class DppoKlLoss(DppoTvLoss):
    """DPPO, by the divergence of the two outcomes "this token" and "any other"."""

    implementation = "losses.dppo:dppo_kl"
    type: Literal["dppo_kl"] = "dppo_kl"  # type: ignore[assignment]
    threshold_low: float = Field(0.02, ge=0)
    """Largest divergence, in nats, where the advantage is not positive, e.g. ``0.05``."""
    threshold_high: float = Field(0.02, ge=0)
    """Largest divergence, in nats, where it is positive, e.g. ``0.05``."""


class DroLoss(Choice):
    """DRO: the policy gradient with a quadratic penalty on the log-ratio."""

    implementation = "losses.dro:dro"
    paper = "Richemond et al. 2024, arXiv:2405.19107"
    type: Literal["dro"] = "dro"
    beta: float = Field(0.1, ge=0)
    """Weight of the penalty."""


# --- corrections -----------------------------------------------------------------------------------------------------


class NoCorrection(Choice):
    """No importance weights."""

    type: Literal["none"] = "none"


class TruncatedCorrection(Choice):
    """Importance weights, truncated from above."""

    implementation = "corrections.truncated:truncated"
    paper = "Yao et al. 2025; sequences: Liu et al. 2025"
    type: Literal["truncated"] = "truncated"
    level: Literal["token", "sequence"] = "token"
    """A weight for each token, or for each trajectory the product of its tokens' weights."""
    upper: float = Field(2.0, gt=0)
    """Largest weight."""
    normalize: bool = False
    """Divide the weights by their mean over the step."""


class IcePopCorrection(TruncatedCorrection):
    """IcePop: importance weights inside a band, and none outside of it."""

    implementation = "corrections.icepop:icepop"
    paper = "Ling team 2025, arXiv:2510.18855"
    type: Literal["icepop"] = "icepop"  # type: ignore[assignment]
    lower: float = Field(0.5, ge=0)
    """Tokens (or trajectories) with a smaller weight are left out."""
    upper: float = Field(5.0, gt=0)
    """Tokens (or trajectories) with a larger weight are left out, e.g. ``2.0``."""


class RejectRule(Section):
    """Leaves out tokens, or whole trajectories, that the trainer's policy finds too unlike what the engine said."""

    kind: Literal[
        "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
        "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
    ]  # fmt: skip
    """Of each token, or the sum, mean or maximum over a trajectory: k1, the log-ratio of engine to trainer; k2, half
    its square; k3, Schulman's estimate of the divergence."""
    upper: float = Field(gt=0)
    """More is left out; for k1 a ratio, e.g. ``1.4``."""
    lower: float | None = Field(None, gt=0)
    """Less is left out; for k1 alone, a ratio, e.g. ``0.75``."""

    @model_validator(mode="after")
    def _bounds(self) -> RejectRule:
        if self.kind.endswith("k1") != (self.lower is not None):
            raise ValueError(f"lower: {self.kind} {'needs it' if self.kind.endswith('k1') else 'has none'}")
        return self


# --- all of it -------------------------------------------------------------------------------------------------------


class CustomFunction(Traits):
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


class KLConfig(Section):
    """The penalty for leaving the reference model."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the penalty, e.g. ``0.001``; 0: none, and no reference process."""
    kind: Literal["k1", "abs", "k2", "k3"] = "k3"
    """How the divergence is estimated from the sampled tokens (Schulman 2020). See docs/algorithms.md."""
    place: Literal["loss", "reward"] = "loss"
    """``loss``: a term of the loss, with a gradient (GRPO). ``reward``: taken off each token's reward, as PPO does it
    (Ouyang et al. 2022), by the log-probabilities of the policy that sampled."""
    target: float | None = Field(None, gt=0)
    """With ``place: reward``, the divergence in nats a token that the coefficient is steered to (Ziegler et al. 2019),
    e.g. ``0.05``; null: it stays what it is."""
    horizon: float = Field(10000.0, gt=0)
    """Trajectories in which a coefficient with a `target` grows or falls by a fifth at most."""
    gradient: Literal["own", "k2"] = "own"
    """``own``: the gradient of the estimate itself. ``k2``: keep its value, but use the gradient of k2. Of a term of
    the loss alone."""

    @property
    def in_reward(self) -> bool:
        """It is taken off the reward."""
        return self.place == "reward" and self.coefficient > 0

    @model_validator(mode="after")
    def _fits(self) -> KLConfig:
        if self.place == "reward" and not self.coefficient:
            raise ValueError("place: reward takes nothing off at coefficient=0; set a coefficient, e.g. 0.01")
        if self.target is not None and self.place != "reward":
            raise ValueError("target: only a penalty with place=reward has a coefficient that adapts")
        return self


BuiltInAdvantage = (
    GaeAdvantage | GroupAdvantage | LeaveOneOutAdvantage | ReinforcePlusPlusAdvantage
    | ReinforcePlusPlusBaselineAdvantage | OpoAdvantage | GpgAdvantage | PassAtKAdvantage | MaxRlAdvantage
    | GdpoAdvantage
)  # fmt: skip
BuiltInLoss = (
    ClippedLoss | ReinforceLoss | GspoLoss | CispoLoss | SapoLoss | GeoMeanLoss | DppoTvLoss | DppoKlLoss | DroLoss
)
BuiltInCorrection = NoCorrection | TruncatedCorrection | IcePopCorrection
AdvantageConfig = Annotated[BuiltInAdvantage | CustomFunction, Field(discriminator="type")]
LossConfig = Annotated[BuiltInLoss | CustomFunction, Field(discriminator="type")]
CorrectionConfig = Annotated[BuiltInCorrection | CustomFunction, Field(discriminator="type")]


class AlgorithmConfig(Section):
    """Three choices that compose: an advantage, a policy loss, a correction for off-policy data. Defaults: GRPO.
    `penstock algorithms` lists them with their papers."""

    preset: PresetName | None = None
    """A published method by its name, e.g. ``dapo``: the choices below that are not given are its own, and another one
    is an error. `--dry-run` shows them."""
    advantage: AdvantageConfig = GroupAdvantage()
    """How much better than expected a trajectory was."""
    loss: LossConfig = ClippedLoss()
    """What the optimizer makes small, from advantages and log-probabilities."""
    correction: CorrectionConfig = NoCorrection()
    """Weights for tokens that another policy than the trainer's sampled."""
    reject: list[RejectRule] = []
    """Tokens and trajectories that are left out for being too unlike what the engine said, e.g.
    ``[{kind: seq_mean_k3, upper: 0.01}]``; all rules must pass. They still count in the loss's divisor."""
    ratio: Literal["behaviour", "proximal"] = "behaviour"
    """Denominator of the loss's ratio: the log-probabilities of the policy that sampled (``behaviour``), or those of
    the policy that the step starts from (``proximal``; Hilton et al. 2022). With ``proximal``, take a correction;
    ``behaviour`` holds that ratio already, and both together would count it twice. See docs/algorithms.md."""
    kl: KLConfig = KLConfig()
    """A penalty for leaving the reference model."""
    aggregation: Aggregation | None = None
    """How the losses of tokens become one number, e.g. ``token-mean``: the mean over all tokens of a step, or sums or
    means of each trajectory first; null: as the loss's authors do. See docs/algorithms.md."""
    length_scale: float | None = Field(None, gt=0)
    """Divisor of ``seq-mean-token-sum-norm``, which needs it, e.g. ``256`` (`rollout.sampling.max_new_tokens` is a good
    value); null: none."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        return expand(data) if isinstance(data, dict) and data.get("preset") in PRESETS else data

    @property
    def aggregated(self) -> Aggregation:
        """`aggregation`, or the loss's own."""
        return self.aggregation or self.loss.aggregation
