"""Config sections of the built-in advantages. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from penstock.protocols.columns import GREEDY, POLICY, REFERENCE, SAMPLED, SQUARES, VALUES, WEIGHTS
from penstock.services.trainer.choice import Choice


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


class ReMaxAdvantage(Choice):
    """ReMax: the return of each token, less the reward of a greedy answer to the same prompt, which each group has one
    of beside its own. Needs no group (`n: 1`)."""

    implementation = "advantages.remax:remax"
    paper = "Li et al. 2023, arXiv:2310.10505"
    compares = False
    by_token = True
    given = (GREEDY,)
    type: Literal["remax"] = "remax"


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


class OptimalTokenBaselineAdvantage(Choice):
    """The return of each token, less the group's baseline of least variance at that step, which weighs rows by the
    gradient's expected length so far. Takes a forward pass more."""

    implementation = "advantages.optimal_token_baseline:optimal_token_baseline"
    paper = "cf. Greensmith et al. 2004, JMLR 5; token by token: Li et al. 2025"
    least_n = 2
    by_token = True
    given = (POLICY, SQUARES, WEIGHTS)
    type: Literal["optimal_token_baseline"] = "optimal_token_baseline"
    zero_tail: bool = True
    """Where one answer of a group is alone in going on, its tokens have no baseline; false: their own return is it."""


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


class DistillationAdvantage(Choice):
    """On-policy distillation: how much likelier a teacher finds each token than the policy that sampled it, which is
    the reverse KL divergence with the sign turned. Needs no group (`n: 1`), and no reward."""

    implementation = "advantages.distillation:distillation"
    paper = "Gu et al. 2023, arXiv:2306.08543; Agarwal et al. 2023, arXiv:2306.13649; Lu et al. 2025"
    compares = False
    by_token = True
    given = (SAMPLED,)
    type: Literal["distillation"] = "distillation"
    teachers: dict[str, float] = Field({REFERENCE: 1.0}, min_length=1)
    """Columns of log-probabilities, each with its weight: ``{reference: 1.0}`` is the model of `reference.path`;
    several are scorers, e.g. ``{maths: 0.5, law: 0.5}``."""

    @field_validator("teachers")
    @classmethod
    def _weigh(cls, teachers: dict[str, float]) -> dict[str, float]:
        if min(teachers.values()) < 0 or sum(teachers.values()) <= 0:
            raise ValueError("weights of teachers are not negative, and one of them is above 0")
        return teachers

    gamma: float = Field(0.0, ge=0, le=1)
    """How much a token answers for what the policy says after it: 0, for itself alone; e.g. ``1.0``."""
    reward: float = Field(0.0, ge=0)
    """Weight of the task's own reward beside the teachers, e.g. ``0.1``; 0: it is only watched."""

    @property
    def columns(self) -> list[str]:
        """The teachers."""
        return list(self.teachers)

    def options(self) -> dict[str, Any]:
        """Weights, in the order of the columns."""
        return {"weights": list(self.teachers.values()), "gamma": self.gamma, "reward": self.reward}


BuiltInAdvantage = (
    GaeAdvantage | GroupAdvantage | LeaveOneOutAdvantage | ReMaxAdvantage | ReinforcePlusPlusAdvantage
    | ReinforcePlusPlusBaselineAdvantage | OpoAdvantage | OptimalTokenBaselineAdvantage | GpgAdvantage
    | PassAtKAdvantage | MaxRlAdvantage | GdpoAdvantage | DistillationAdvantage
)  # fmt: skip
