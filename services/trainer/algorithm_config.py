"""Config sections of `trainer.algorithm`: what can be chosen, with its options and its paper. Imports no torch.

A section names the function that it stands for; `services.trainer.algorithms.compose` finds it there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from penstock.protocols.columns import PICKED, POLICY
from penstock.services.learning.config import ConstraintConfig, KLConfig, Penalties, RewardShape
from penstock.services.runtime.settings import Section
from penstock.services.trainer.advantage_config import BuiltInAdvantage, GroupAdvantage
from penstock.services.trainer.choice import Aggregation, Choice, Traits
from penstock.services.trainer.loss_config import BuiltInLoss, ClippedLoss
from penstock.services.trainer.presets import PRESETS, PresetName, expand, with_types
from penstock.services.trainer.term_config import (
    DistillConfig,
    EntropyControlConfig,
    GivenLossConfig,
    ImitationConfig,
    TeacherAdvantageConfig,
)

# --- corrections -----------------------------------------------------------------------------------------------------


class NoCorrection(Choice):
    """No importance weights."""

    type: Literal["none"] = "none"


class TruncatedCorrection(Choice):
    """Importance weights, truncated from above, and from below with `lower`."""

    implementation = "corrections.truncated:truncated"
    paper = "Yao et al. 2025; sequences: Liu et al. 2025"
    type: Literal["truncated"] = "truncated"
    level: Literal["token", "sequence"] = "token"
    """A weight for each token, or for each trajectory the product of its tokens' weights."""
    upper: float = Field(2.0, gt=0)
    """Largest weight."""
    lower: float | None = Field(None, ge=0)
    """Smallest weight: a smaller one is raised to it, e.g. ``0.5``; null: none is."""
    normalize: bool = False
    """Divide the weights by their mean over the step."""

    @model_validator(mode="after")
    def _a_band(self) -> TruncatedCorrection:
        if self.lower is not None and self.lower > self.upper:
            raise ValueError(f"lower={self.lower:g} exceeds upper={self.upper:g}: {self._out_of_it}")
        return self

    @property
    def _out_of_it(self) -> str:
        return "every weight would be the same"


class IcePopCorrection(TruncatedCorrection):
    """IcePop: importance weights inside a band, and none outside of it."""

    implementation = "corrections.icepop:icepop"
    paper = "Ling team 2025, arXiv:2510.18855"
    type: Literal["icepop"] = "icepop"  # type: ignore[assignment]
    lower: float = Field(0.5, ge=0)
    """Tokens (or trajectories) with a smaller weight are left out."""
    upper: float = Field(5.0, gt=0)
    """Tokens (or trajectories) with a larger weight are left out, e.g. ``2.0``."""

    @property
    def _out_of_it(self) -> str:
        return "every token would be left out"


class RejectRule(Section):
    """Leaves out tokens, or whole trajectories, that the trainer's policy finds too unlike what the engine said."""

    kind: Literal[
        "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
        "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
    ]  # fmt: skip
    """Of each token, or the sum, mean or maximum over a trajectory: k1, the log-ratio of engine to trainer; k2, half
    its square; k3, Schulman's estimate of the divergence."""
    upper: float = Field(gt=0)
    """More is left out; for k1 a ratio, above 1, which is exp of a number of nats, e.g. ``1.4``."""
    lower: float | None = Field(None, gt=0)
    """Less is left out; for k1 alone, a ratio, below 1, e.g. ``0.75``; null: no bound below."""
    of: Literal["all", "negative"] = "all"
    """``negative``: only what has a negative advantage is left out (DeepSeek-V3.2, with ``seq_mean_k1``): a policy must
    not learn to avoid what it would not say any more, e.g. ``negative``."""

    @model_validator(mode="after")
    def _bounds(self) -> RejectRule:
        if self.lower is not None and not self.kind.endswith("k1"):
            raise ValueError(f"lower: {self.kind} has none; leave it out, or take a rule of k1")
        if self.lower is not None and self.lower >= self.upper:
            raise ValueError(f"lower={self.lower:g} is not below upper={self.upper:g}: everything would be left out")
        return self


# --- all of it -------------------------------------------------------------------------------------------------------


class SubsetConfig(Section):
    """Which answers of a group the policy learns from, where it is not all of them: fewer are gone over, those that
    tell good from bad the most."""

    keep: int = Field(ge=2)
    """Answers of each group that stay, e.g. ``4`` of `rollout.sampling.n: 16`; an agent's session counts once."""
    by: Literal["max_variance", "best_worst", "best_random"] = "max_variance"
    """``max_variance``: the best and the worst, so many of each that their rewards differ the most (PODS, Xu et al.
    2025, arXiv:2504.13818, theorem 1); ``best_worst``: half of them the best, half the worst; ``best_random``: half the
    best, half any of the others (PF-PPO, Shen and Zhang 2024, arXiv:2409.06957: a reward model is most often right of
    those)."""


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


BuiltInCorrection = NoCorrection | TruncatedCorrection | IcePopCorrection
AdvantageConfig = Annotated[BuiltInAdvantage | CustomFunction, Field(discriminator="type")]
LossConfig = Annotated[BuiltInLoss | CustomFunction, Field(discriminator="type")]
CorrectionConfig = Annotated[BuiltInCorrection | CustomFunction, Field(discriminator="type")]


class AlgorithmConfig(Section):
    """Three choices that compose: an advantage, a policy loss, a correction for off-policy data. Defaults: GRPO, with
    DAPO's mean over all tokens. `penstock algorithms` lists them with their papers."""

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
    ratio: Literal["behaviour", "proximal", "interpolated"] = "behaviour"
    """Denominator of the loss's ratio: the log-probabilities of the policy that sampled (``behaviour``), or those of
    the policy that the step starts from (``proximal``; Hilton et al. 2022), or, in their place, what lies between the
    policies that sampled and that train, by the token's age (``interpolated``; A-3PO, Li et al. 2025,
    arXiv:2512.06547), which saves a pass where a step has several updates. With the last two, take a correction;
    ``behaviour`` holds that ratio already, and both together would count it twice. See docs/algorithms.md."""
    kl: KLConfig = KLConfig()
    """A penalty for leaving the reference model."""
    sampler_penalty: float = Field(0.0, ge=0)
    """What the square of a token's log(π/μ) adds to the loss, μ being the policy that sampled it, e.g. ``0.001``: it
    draws every sampled token back, also those that a clip, a trust region, `reject` or `entropy_share` leaves out; 0:
    nothing (Kimi K2.5, arXiv:2602.02276, beside ``dppo_tv`` in prime-rl)."""
    entropy_bonus: float = Field(0.0, ge=0)
    """What a nat of the policy's entropy takes off the loss, by token, e.g. ``0.001``: it keeps the policy from
    settling early. The entropy is exact, over the whole vocabulary, or with `rollout.sampling.candidates` over
    those; 0: none, and the metric is an estimate. With `entropy_control` it is what the bonus begins with."""
    entropy_control: EntropyControlConfig | None = None
    """Steers the entropy bonus to a target, e.g. ``{target: 0.2}``; null: it stays what it is."""
    entropy_share: float = Field(1.0, gt=0, le=1)
    """Only so large a share of an update's tokens learns, e.g. ``0.2``: those where the policy is most undecided, that
    is, has the highest entropy (Wang et al. 2025, arXiv:2506.01939). All others still count in the loss's divisor, and
    in `kl`; it takes a forward pass more. 1: all."""
    truncated: Literal["learn", "mask"] = "learn"
    """``mask``: of an answer that was cut off, for want of tokens or turns, nobody knows whether it would have been
    right, so the policy learns nothing from it, and it counts in no divisor; its reward is still compared with its
    group's (overlong filtering: DAPO, Yu et al. 2025, arXiv:2503.14476). ``learn``: it is like any other."""
    subset: SubsetConfig | None = None
    """The policy learns from some answers of each group alone, e.g. ``{keep: 4}``, and compares these among themselves;
    null: from all. See docs/algorithms.md."""
    imitate: ImitationConfig = ImitationConfig()
    """A term of the loss that makes good answers likelier, e.g. ``{coefficient: 0.1}``."""
    given: GivenLossConfig = GivenLossConfig()
    """What is learned from answers that are given (`rollout.given`), e.g. ``{coefficient: 0.1}``."""
    distill: DistillConfig | None = None
    """A term of the loss that draws the policy to teachers' whole distributions, e.g. ``{teachers: {teacher: 1.0}}``;
    null: none. See docs/algorithms.md."""
    teacher_advantage: TeacherAdvantageConfig | None = None
    """What teachers add to each token's advantage, of whatever kind that is, before `whiten` and `advantage_bound`,
    e.g. ``{teachers: {reference: 1.0}, coefficient: 0.1}``; null: nothing. See docs/algorithms.md."""
    router_balance: float = Field(0.0, ge=0)
    """Of a mixture of experts: what the loss that keeps its routers from sending all tokens to a few counts, e.g.
    ``0.001`` (Switch Transformer, Fedus et al. 2021, arXiv:2101.03961); it takes a forward pass more. 0: nothing."""
    whiten: bool = False
    """Less their mean over all sampled tokens of the step, and divided by their deviation, are advantages of every
    kind, e.g. ``true``; `gae`, `gdpo` and the two of REINFORCE++ are by themselves."""
    advantage_bound: float | None = Field(None, gt=0)
    """Advantages are kept between minus this and this, last of all, e.g. ``5.0``; null: no bound."""
    reward_shape: RewardShape = RewardShape()
    """What policy and a critic of values see of the reward, e.g. ``{shift: -0.5, scale: 2.0}``; metrics and evaluations
    have it as it is."""
    constraints: list[ConstraintConfig] = []
    """Costs that are kept below a limit, e.g. ``[{column: reward/length, limit: 200}]``. See docs/algorithms.md."""
    aggregation: Aggregation | None = None
    """How the losses of tokens become one number, e.g. ``token-mean``: the mean over all tokens of a step, or sums or
    means of each trajectory first; null: as the loss's authors do. See docs/algorithms.md."""
    length_scale: float | None = Field(None, gt=0)
    """Divisor of ``seq-mean-token-sum-norm``, which needs it, e.g. ``256`` (`rollout.sampling.max_new_tokens` is a good
    value); null: none."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return with_types(expand(data) if data.get("preset") in PRESETS else data, GroupAdvantage(), ClippedLoss())

    @model_validator(mode="after")
    def _rewards_are_read(self) -> AlgorithmConfig:
        """What changes the reward needs an advantage that reads it, and compares it with what is changed likewise."""
        kind = self.advantage.type
        taken = "constraints" if self.constraints else "kl.place=reward" if self.kl.in_reward else ""
        shares = [getattr(self.advantage, name, 1.0) for name in ("reward", "group_share")]
        unread = kind in ("gdpo", "none") or not all(shares)
        if self.reward_shape.changes and unread:
            raise ValueError(f"reward_shape: advantage={kind} does not read the reward; leave it out")
        if taken and (unread or kind == "remax"):
            why = "its greedy baseline would not pay" if kind == "remax" else "it does not read the reward"
            raise ValueError(f"{taken}: it is taken off the reward, and advantage={kind} has no use for that: {why}")
        shape = self.reward_shape
        below = "reward_shape" if shape.shift < 0 or (shape.low is not None and shape.low < 0) else ""
        if (taken or below) and kind == "maxrl":
            raise ValueError(
                f"{taken or below}: it lowers the reward, and advantage=maxrl divides by a group's mean reward, which "
                "must not be negative"
            )
        if self.given.shape == "distill" and not self.distill:
            raise ValueError(
                "given.shape=distill: there is no teacher; give distill, e.g. {teachers: {teacher: 1.0}}, or preset=gkd"
            )
        if self.given.compared and kind == "none":
            raise ValueError(
                "given.compared: with advantage=none no answer is worth more than another; set it to false, with "
                "given.shape=nll, or take an advantage, e.g. grpo"
            )
        own = self.advantage.beside_reference and self.given.as_sampled  # the trainer computes how likely they are
        reads = (self.advantage.by_token or self.advantage.given) and not own
        if self.given.compared and (reads or self.kl.in_reward):
            why = "kl.place=reward" if self.kl.in_reward else f"advantage={kind}"
            raise ValueError(
                f"given.compared: {why} reads what the policy said of each token, and of a given answer it said "
                "nothing; set it to false, or take an advantage of whole answers, e.g. grpo"
            )
        tokens = [rule.kind for rule in self.reject if rule.kind.startswith("token")]
        if tokens and self.loss.type == "geo_mean":
            raise ValueError(
                f"reject: {tokens[0]} leaves out tokens, and each token of loss=geo_mean has the whole trajectory's "
                "loss; take a rule of trajectories, e.g. seq_mean_k3"
            )
        if self.advantage.by_token and self.loss.type == "geo_mean":
            raise ValueError(
                f"loss=geo_mean: each token of it has the whole trajectory's loss, and advantage={kind} tells tokens "
                "apart; take an advantage of whole answers, e.g. grpo, or another loss, e.g. ppo_clip"
            )
        if self.ratio == "interpolated" and not self.loss.has_ratio:
            raise ValueError(
                f"ratio=interpolated: loss={self.loss.type} has no ratio, which would make up for what the correction "
                "then leaves out; take ratio=behaviour"
            )
        if self.entropy_share < 1 and self.loss.type == "geo_mean":
            raise ValueError(
                f"entropy_share={self.entropy_share:g}: it leaves out tokens, and each token of loss=geo_mean has the "
                "whole trajectory's loss; take another loss, e.g. ppo_clip"
            )
        return self

    @model_validator(mode="after")
    def _teachers_tell_sampled_tokens_apart(self) -> AlgorithmConfig:
        if self.teacher_advantage and self.loss.type == "geo_mean":
            raise ValueError(
                "teacher_advantage: it tells tokens apart, and each token of loss=geo_mean has the whole trajectory's "
                "loss; take another loss, e.g. ppo_clip"
            )
        if self.teacher_advantage and self.given.compared:
            raise ValueError(
                "teacher_advantage: it reads what the policy said of each token, and of a given answer it said "
                "nothing; set given.compared to false"
            )
        return self

    @property
    def learns_from_sampled(self) -> bool:
        """Something is learned from what the policy has sampled."""
        beside = bool(self.distill or self.teacher_advantage or self.entropy_control)
        beside = beside or bool(self.imitate.coefficient or self.entropy_bonus or self.kl.coefficient)
        return self.advantage.type != "none" or beside or self.loss.type == "custom"

    @property
    def equal_is_idle(self) -> bool:
        """A group whose rewards are all equal teaches nothing."""
        taught = self.distill or self.teacher_advantage
        beside = self.constraints or self.kl.in_reward or self.imitate.coefficient or taught
        return self.advantage.compares and not self.advantage.equal_teach and not beside

    @property
    def weighs_policy(self) -> bool:
        """The advantage is given what the policy of the step's start says of each token: a forward pass more."""
        return POLICY in self.advantage.given

    @property
    def needs_proximal(self) -> bool:
        """Where a step has several updates, the log-probabilities that it began with are to be kept: a forward pass
        more."""
        compares = self.correction.type != "none" or bool(self.reject)
        return self.ratio != "interpolated" and (self.ratio == "proximal" or compares)

    @property
    def picks_tokens(self) -> bool:
        """Some tokens are told from all others of their update, before any of its losses: a forward pass more."""
        return PICKED in self.loss.given or self.entropy_share < 1

    @property
    def penalties(self) -> Penalties:
        """What is made of the rewards, and taken off them."""
        return Penalties(self.kl, tuple(self.constraints), self.reward_shape)

    @property
    def aggregated(self) -> Aggregation:
        """`aggregation`, or the loss's own."""
        return self.aggregation or self.loss.aggregation
