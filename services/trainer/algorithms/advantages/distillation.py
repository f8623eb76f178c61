"""On-policy distillation by reverse KL: Gu et al. 2023, arXiv:2306.08543 (MiniLLM); Agarwal et al. 2023,
arXiv:2306.13649; with the sampled token's own estimate of the divergence as its advantage: Lu et al. 2025. By the
policy itself, which has seen more: Hübotter et al. 2026, arXiv:2601.20802 (SDPO)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.services.learning.token_returns import discounted
from penstock.services.trainer.algorithms.advantages.grpo import grpo


def distillation(
    tokens: torch.Tensor,
    mask: torch.Tensor,
    groups: torch.Tensor,
    *columns: torch.Tensor,
    weights: Sequence[float],
    gamma: float,
    reward: float,
) -> torch.Tensor:
    """``columns``: what each teacher says of every sampled token (its log-probability), then what the policy said that
    sampled it, all ``[rows, length]``; NaN of a teacher that is not asked for the row's source. A token's gain is the
    teachers' weighted mean less the policy's, so the mean of its negative is the reverse divergence; the advantage is
    the sum of gains from the token on, discounted by ``gamma``, with ``reward`` times the return of the task's own
    rewards ``tokens``."""
    *teachers, sampled = columns
    found = discounted(gain(teachers, weights, sampled, mask).to(tokens.dtype), mask, gamma)
    return (found + reward * discounted(tokens, mask, 1.0)) * mask if reward else found


def gain(
    teachers: Sequence[torch.Tensor], weights: Sequence[float], sampled: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """How much likelier ``teachers`` find each token in their weighted mean than the policy that ``sampled`` it, all
    ``[rows, length]``; NaN of a teacher that is not asked for the row's source; 0 where ``mask`` is."""
    return (_mean(teachers, weights, sampled) - sampled) * mask


def _mean(teachers: Sequence[torch.Tensor], weights: Sequence[float], sampled: torch.Tensor) -> torch.Tensor:
    """Their weighted mean over those that were asked; ``sampled`` where none was, so that nothing is gained."""
    asked = [~teacher.isnan() for teacher in teachers]
    said = torch.zeros_like(sampled)
    for weight, teacher in zip(weights, teachers, strict=True):
        said = said + weight * teacher.nan_to_num()
    if all(bool(each.all()) for each in asked):
        return said / sum(weights)
    total = torch.stack([weight * each for weight, each in zip(weights, asked, strict=True)]).sum(0)
    return torch.where(total > 0, said / total.clamp(min=1e-9), sampled)


def self_distillation(
    tokens: torch.Tensor,
    mask: torch.Tensor,
    groups: torch.Tensor,
    policy: torch.Tensor,
    taught: torch.Tensor,
    *,
    bound: float | None,
    group_share: float,
) -> torch.Tensor:
    """``policy`` and ``taught`` ``[rows, length]``: each token's log-probability under the policy of the step's start,
    as it is asked, and once it has seen a good answer; equal where it has not. A token's advantage is what it gains,
    at most ``bound`` either way, so the mean of its negative is the reverse divergence from the teacher (eq. 4, with
    the sampled token's estimate); ``group_share`` λ of it is GRPO's (λ A_GRPO + (1 - λ) A_SDPO)."""
    gain = (taught - policy).to(tokens.dtype) * mask
    if bound is not None:
        gain = gain.clamp(-bound, bound)
    return gain if not group_share else group_share * grpo(tokens.sum(-1), mask, groups) + (1 - group_share) * gain
