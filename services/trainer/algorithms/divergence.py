"""How far a policy's distribution is from a teacher's: Agarwal et al. 2023, arXiv:2306.13649 (GKD), section 2 and
eq. 1; reverse: Gu et al. 2023, arXiv:2306.08543 (MiniLLM)."""

from __future__ import annotations

import math

import torch


def divergence(teacher: torch.Tensor, policy: torch.Tensor, kind: str, beta: float) -> torch.Tensor:
    """``[tokens]``, in nats, from log-probabilities ``[tokens, outcomes]`` of two whole distributions P, the teacher's,
    and Q, the policy's: ``forward_kl`` is KL(P | Q), ``reverse_kl`` KL(Q | P), ``mixed`` β KL(P | Q) +
    (1 - β) KL(Q | P), and ``jsd`` the generalised Jensen-Shannon divergence β KL(P | M) + (1 - β) KL(Q | M) with
    M = β P + (1 - β) Q."""
    if kind == "forward_kl":
        return _kl(teacher, policy)
    if kind == "reverse_kl":
        return _kl(policy, teacher)
    if kind == "mixed":
        return beta * _kl(teacher, policy) + (1 - beta) * _kl(policy, teacher)
    mixed = torch.logaddexp(teacher + math.log(beta), policy + math.log1p(-beta))
    return beta * _kl(teacher, mixed) + (1 - beta) * _kl(policy, mixed)


def _kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one.exp() * (one - other)).sum(-1)
