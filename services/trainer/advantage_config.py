"""Config sections of the built-in advantages. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from penstock.protocols.columns import (
    GREEDY,
    POLICY,
    PROCESS,
    REFERENCE,
    SAMPLED,
    SCORES,
    SESSIONS,
    SQUARES,
    STATES,
    TAUGHT,
    VALUES,
    WEIGHTS,
)  # fmt: skip
from penstock.services.trainer.choice import Choice
from penstock.services.trainer.running_advantages import PromptAdvantage, RoleAdvantage


class GroupAdvantage(Choice):
    """Rewards standardised within the group; without `std`, Dr. GRPO's; with the step's, Lite PPO's; beside the others
    of the group alone with `leave_one_out`."""

    implementation = "advantages.grpo:grpo"
    paper = "Shao et al. 2024, arXiv:2402.03300; Liu et al. 2025, arXiv:2503.20783, arXiv:2508.08221"
    least_n = 2
    type: Literal["grpo"] = "grpo"
    std: bool | Literal["step"] = True
    """Divide by the group's standard deviation; false: not, as Dr. GRPO does; ``step``: by that of all the step's
    rewards, as Lite PPO does."""
    leave_one_out: bool = False
    """Mean and deviation are those of the group's others, e.g. ``true``: a lone success of 16 is worth 1.0, and nothing
    is divided where the others are all equal. Without `std` it is `rloo`."""


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
    paper = "Schulman et al. 2015, arXiv:1506.02438; Schulman et al. 2017, arXiv:1707.06347; λ: arXiv:2504.05118"
    whitens = True
    compares = False
    by_token = True
    type: Literal["gae"] = "gae"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount a token: how much less a reward counts for a token the further off it is, e.g. ``0.99``."""
    lam: float = Field(1.0, ge=0, le=1)
    """λ: 1 trusts the reward alone, 0 the critic's value of the next token alone, e.g. ``0.95``."""
    length_alpha: float | None = Field(None, gt=0)
    """λ by the answer's length, in `lam`'s place: 1 − 1 / (this · its sampled tokens), so that the reward reaches the
    first token of a long answer as well, e.g. ``0.05`` (VAPO, Yue et al. 2025, arXiv:2504.05118); null: `lam`."""

    @property
    def columns(self) -> list[str]:
        """The critic's values."""
        return [VALUES]


class PrimeAdvantage(Choice):
    """PRIME's: the outcome, less the mean of the group's others, and beside it a reward for each token, by a critic of
    another kind: a language model that learns which answers are right, and from that what each token was worth. Starts
    a critic process (`critic`) and a reference."""

    implementation = "advantages.prime:prime"
    paper = "Cui et al. 2025, arXiv:2502.01456; Yuan et al. 2024, arXiv:2412.01981"
    least_n = 2
    by_token = True
    equal_teach = True
    given = (SCORES, SESSIONS)
    type: Literal["prime"] = "prime"
    share: float = Field(1.0, ge=0)
    """What process rewards count beside the outcome, e.g. ``5.0``."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount a token of the process rewards, e.g. ``0.99``."""

    @property
    def columns(self) -> list[str]:
        """The critic's."""
        return [PROCESS]


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
    whitens = True
    compares = False
    by_token = True
    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount a token: how much less the reward counts for a token the further it is from the end."""


class ReinforcePlusPlusBaselineAdvantage(Choice):
    """REINFORCE++ with the group's mean as baseline, whitened over all tokens of the step."""

    implementation = "advantages.reinforce_plus_plus:reinforce_plus_plus_baseline"
    paper = "Hu et al. 2025, arXiv:2501.03262"
    whitens = True
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
    """GPG: the reward, less the group's mean, divided by the share of answers in groups whose rewards are not all
    equal."""

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
    whitens = True
    least_n = 2
    equal_teach = True
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


class GigpoAdvantage(Choice):
    """GiGPO, for tasks of several turns: GRPO's advantage of the whole answer, and beside it each turn's return,
    compared with those of the group's turns that answer the same observation."""

    implementation = "advantages.gigpo:gigpo"
    paper = "Feng et al. 2025, arXiv:2505.10978"
    least_n = 2
    by_token = True
    given = (STATES, SCORES, SESSIONS)
    equal_teach = True
    type: Literal["gigpo"] = "gigpo"
    gamma: float = Field(0.95, ge=0, le=1)
    """Discount a turn: how much less a reward counts for a turn the more turns before it came, e.g. ``1.0``."""
    turn_weight: float = Field(1.0, ge=0)
    """Weight of the turn's part beside the whole answer's, e.g. ``0.5``."""
    std: bool = True
    """Divide both parts by the standard deviation of what they are compared with; false: not."""


class DistillationAdvantage(Choice):
    """On-policy distillation: how much likelier a teacher finds each token than the policy that sampled it, which is
    the reverse KL divergence with the sign turned. Needs no group (`n: 1`), and reads no reward."""

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


class SelfDistillationAdvantage(Choice):
    """SDPO: how much likelier the policy finds each token of an answer once it has seen a good answer to the prompt: it
    is its own teacher. Takes two forward passes more. An answer without a good one beside it teaches nothing."""

    implementation = "advantages.distillation:self_distillation"
    paper = "Hübotter et al. 2026, arXiv:2601.20802; with the truth: Zhao et al. 2026, arXiv:2601.18734"
    by_token = True
    given = (POLICY, TAUGHT)
    equal_teach = True
    type: Literal["self_distillation"] = "self_distillation"
    shows: Literal["answer", "truth"] = "answer"
    """What the teacher sees: the best other ``answer`` of the group, or the prompt's ``truth`` (OPSD), for which no
    answer needs to be good, nor a group to have several (`n: 1`)."""
    success: float = 1.0
    """An answer is good from this reward on, e.g. ``0.5``."""
    template: str = "{prompt}\n\nCorrect solution:\n\n{solution}\n\nCorrectly solve the original question.\n"
    """What the teacher is asked in the prompt's place (of a chat, in that of its last message), e.g.
    ``"{prompt} A good answer: {solution} Now yours:"``."""
    thinking: bool = False
    """The teacher sees also what stands between <think> and </think> in a good answer, e.g. ``true``."""
    teacher_rate: float = Field(0.05, ge=0, le=1)
    """The teacher is a running mean of the policy's weights, and goes this far towards them after each step, e.g.
    ``0.01``; 0: it stays what the run began with; 1: it is the policy, which needs no memory for it (4 bytes a
    parameter), and may lead both astray."""
    longest: int = Field(8192, ge=1)
    """Tokens of the teacher's prompt with the answer to be judged; what is longer teaches nothing, e.g. ``4096``."""
    bound: float | None = Field(None, gt=0)
    """Largest gain or loss of a token, in nats, e.g. ``2.0``: words of style can outweigh all others; null: none."""
    group_share: float = Field(0.0, ge=0, le=1)
    """Share of GRPO's advantage in it, e.g. ``0.1``; the rest is the teacher's."""

    @field_validator("template")
    @classmethod
    def _shows_it(cls, template: str) -> str:
        try:
            said = template.format(prompt="\0p", solution="\0s")
        except (LookupError, ValueError) as error:
            raise ValueError(f"it has {{prompt}} and {{solution}}, and no other braces: {error!r}") from error
        if "\0p" not in said or "\0s" not in said:
            raise ValueError("it must have {prompt} and {solution}, or the teacher sees no more than the policy")
        return template

    @property
    def compares(self) -> bool:  # type: ignore[override]
        """An answer is shown another one, unless it is the truth that is seen."""
        return self.shows == "answer"

    @property
    def least_n(self) -> int:  # type: ignore[override]
        """An answer is shown another one."""
        return 2 if self.shows == "answer" or self.group_share else 1

    def options(self) -> dict[str, Any]:
        """Of the function alone: what is shown is the learner's affair."""
        return {"bound": self.bound, "group_share": self.group_share}


class BesideReference(Choice):
    """Of those that compare a group's whole answers by how likely they are beside the reference."""

    least_n = 2
    by_token = True
    beside_reference = True
    given = (POLICY, SCORES, SESSIONS)

    @property
    def columns(self) -> list[str]:
        """The reference's log-probabilities."""
        return [REFERENCE]


class OnlineDpoAdvantage(BesideReference):
    """Online DPO: the best answer of each group is preferred to the worst, beside the reference. With `loss: reinforce`
    its gradient is that of DPO's loss on these pairs, as the policy is when the step begins. Starts a reference; takes
    a forward pass more."""

    implementation = "advantages.online_dpo:online_dpo"
    paper = "Guo et al. 2024, arXiv:2402.04792; Rafailov et al. 2023, arXiv:2305.18290; IPO: arXiv:2310.12036"
    type: Literal["online_dpo"] = "online_dpo"
    beta: float = Field(0.1, gt=0)
    """β: the larger, the nearer to the reference, e.g. ``0.5``."""
    shape: Literal["sigmoid", "ipo"] = "sigmoid"
    """The loss of a pair: DPO's ``sigmoid``, or the square of ``ipo``, which does not go on pulling at what is sure."""


class GvpoAdvantage(BesideReference):
    """GVPO, TBA: an answer is to be as much likelier than the others of its group, beside the reference, as its reward
    is higher. With `loss: reinforce` its gradient is that of their squared difference, as the policy is when the step
    begins, whoever sampled. Starts a reference; takes a forward pass more."""

    implementation = "advantages.gvpo:gvpo"
    equal_teach = True
    paper = "Zhang et al. 2025, arXiv:2504.19599; Bartoldson et al. 2025, arXiv:2503.18929; FlowRL: arXiv:2509.15207"
    type: Literal["gvpo"] = "gvpo"
    beta: float = Field(0.1, gt=0)
    """β: a reward higher by 1 is to make an answer exp(1/β) times as likely beside the reference, e.g. ``0.05``; the
    larger, the nearer to that."""
    per_token: bool = False
    """Means over an answer's tokens are compared, and not their sums, e.g. ``true``, as FlowRL does it, for long
    answers; with `aggregation: seq-mean-token-mean`."""


class NoAdvantage(Choice):
    """None: the policy learns from what stands beside the policy loss alone, such as `distill` or `imitate`. Needs no
    group (`n: 1`), and reads no reward."""

    compares = False
    type: Literal["none"] = "none"


BuiltInAdvantage = (
    GaeAdvantage | GroupAdvantage | LeaveOneOutAdvantage | ReMaxAdvantage | RoleAdvantage | PromptAdvantage
    | ReinforcePlusPlusAdvantage | ReinforcePlusPlusBaselineAdvantage | OpoAdvantage | OptimalTokenBaselineAdvantage
    | GpgAdvantage
    | PassAtKAdvantage | MaxRlAdvantage | GdpoAdvantage | GigpoAdvantage | DistillationAdvantage
    | SelfDistillationAdvantage | PrimeAdvantage | OnlineDpoAdvantage | GvpoAdvantage
    | NoAdvantage
)  # fmt: skip
