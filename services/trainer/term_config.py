"""Config sections of what is learned beside the policy loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from penstock.protocols.columns import REFERENCE
from penstock.services.runtime.settings import Section


class ImitationConfig(Section):
    """The likelihood of good answers, raised beside the policy loss (the loss of positive examples
    in VAPO, Yue et al. 2025, arXiv:2504.05118)."""

    coefficient: float = Field(0.0, ge=0)
    """What a nat of their tokens' mean negative log-likelihood adds to the loss, e.g. ``0.1``; 0: nothing."""
    above: float = 1.0
    """An answer is good from this reward on, e.g. ``0.5``."""


class GivenLossConfig(Section):
    """What is learned from answers that are given (`rollout.given`), beside the loss of those that the policy has
    sampled; of a group that is given whole, all that is learned."""

    coefficient: float = Field(1.0, ge=0)
    """What this loss counts beside the policy's, e.g. ``0.1``."""
    decay_steps: int = Field(0, ge=0)
    """Steps over which that goes evenly to `final`, e.g. ``200``; 0: it stays."""
    final: float = Field(0.0, ge=0)
    """What it counts from then on, e.g. ``0.05``."""
    shape: Literal["nll", "chord", "luffy", "reinforce", "distill"] = "nll"
    """Of each of their tokens, whose probability is π: ``nll``, −log π, of which the mean over all given tokens is
    added: supervised fine-tuning; ``chord``, the same of −π (1 − π) log π, so that what is sure, and what is far
    from what the policy says, counts less (CHORD's φ, Zhang et al. 2025, arXiv:2508.11408); ``luffy``, −A · π / (π
    + γ), where A is the answer's advantage in its group, divided as the losses of sampled tokens are (the policy
    shaping of LUFFY, Yan et al. 2025, arXiv:2504.14945): it pulls at unlikely tokens more than a ratio would, and
    at likely ones less; ``reinforce``, −A · log π, divided so too, as the loss of that name has it of sampled ones: of
    pairs (`rejected`) DPO's. ``distill``, the divergence of `distill` from teachers, as of sampled tokens, with which
    it is divided: generalised knowledge distillation with rows' answers among the policy's own."""
    gamma: float = Field(0.1, gt=0)
    """γ of ``luffy``, e.g. ``0.2``: the smaller, the sooner a token counts as learned."""
    compared: bool = False
    """Given answers have a part in their group's advantage, e.g. ``true``: a good one lowers what the others of its
    group are worth. ``luffy`` and ``reinforce`` need it."""

    @property
    def weighed(self) -> bool:
        """By the answer's advantage."""
        return self.shape in ("luffy", "reinforce")

    @property
    def as_sampled(self) -> bool:
        """What the loss is for sampled answers, it is for given ones, `imitate` too."""
        return self.shape == "reinforce"

    def at(self, step: int) -> float:
        """What it counts in ``step``, from 0."""
        if not self.decay_steps:
            return self.coefficient
        return self.final + (self.coefficient - self.final) * max(0.0, 1 - step / self.decay_steps)

    @model_validator(mode="after")
    def _has_an_advantage(self) -> GivenLossConfig:
        if self.shape == "distill" and not self.coefficient:
            raise ValueError("coefficient=0: shape=distill would teach nothing; leave one of the two out")
        if self.final and not self.decay_steps:
            raise ValueError(f"final={self.final:g}: the coefficient stays as it is; set decay_steps, e.g. 200")
        if self.weighed and not self.compared:
            raise ValueError(
                f"shape={self.shape} weighs by the answer's advantage in its group; set compared=true, or shape=nll"
            )
        return self


class DistillConfig(Section):
    """The divergence of the policy from teachers, at each token over the tokens that a teacher finds likeliest there
    and all others together (generalised knowledge distillation, Agarwal et al. 2023, arXiv:2306.13649)."""

    teachers: dict[str, Annotated[float, Field(gt=0)]] = Field({"teacher": 1.0}, min_length=1)
    """Columns of scorers ``teacher`` with the option `top_k`, each with its weight in the mean, e.g.
    ``{maths: 0.5, law: 0.5}``; of those that are not asked for a prompt's source there is none."""
    divergence: Literal["forward_kl", "reverse_kl", "mixed", "jsd"] = "forward_kl"
    """From teacher to policy (``forward_kl``: the policy says all that the teacher does), from policy to teacher
    (``reverse_kl``: it says nothing that the teacher does not), a weighted mean of these two (``mixed``), or in between
    (``jsd``), e.g. ``jsd``."""
    beta: float = Field(0.5, gt=0, lt=1)
    """Of ``mixed``: the share of forward_kl, e.g. ``0.7``. Of ``jsd``: the teacher's share in what both are compared
    with, e.g. ``0.1``; near 0 it is this times forward_kl, near 1 the rest times reverse_kl."""
    coefficient: float = Field(1.0, gt=0)
    """What a nat of it, by token, adds to the loss, e.g. ``0.1``."""


class EntropyControlConfig(Section):
    """The entropy bonus is steered to a target (Skywork-OR1, He et al. 2025, arXiv:2505.22312): after each update it
    grows by a step where the policy's entropy is at most the target, and falls by one where it is above, in which case
    the next update has none."""

    target: float = Field(gt=0)
    """Mean entropy, in nats a token, that is not to be fallen below, e.g. ``0.2``; the metric `entropy` of a run's
    first steps says what there is."""
    step: float = Field(0.005, gt=0)
    """What the bonus grows or falls by, e.g. ``0.001``."""
    low: float = Field(0.0, ge=0)
    """Smallest bonus, e.g. ``0.001``."""
    high: float = Field(1.0, gt=0)
    """Largest bonus, e.g. ``0.05``."""

    @model_validator(mode="after")
    def _a_band(self) -> EntropyControlConfig:
        if self.low >= self.high:
            raise ValueError(f"low={self.low:g} is not below high={self.high:g}: nothing would be steered")
        return self


class TeacherAdvantageConfig(Section):
    """On-policy distillation beside any advantage: how much likelier teachers find each sampled token than the policy
    that sampled it (Lu et al. 2025), which in the mean is the reverse KL divergence with the sign turned."""

    teachers: dict[str, Annotated[float, Field(gt=0)]] = Field({REFERENCE: 1.0}, min_length=1)
    """Columns of log-probabilities, each with its weight in the mean: ``{reference: 1.0}`` is the model of
    `reference.path`; others are scorers, e.g. ``{maths: 0.5, law: 0.5}``; of those that are not asked for a prompt's
    source there is none."""
    coefficient: float = Field(1.0, gt=0)
    """What a nat of it adds to the token's advantage, e.g. ``0.1``."""
