"""Estimators of the KL divergence from the reference: Schulman 2020, http://joschu.net/blog/kl-approx.html; without
bias: DeepSeek 2025, arXiv:2512.02556, eq. 7."""

from __future__ import annotations

import torch

from penstock.services.learning.masked_mean import LOG_RATIO_LIMIT

K3_LIMIT = 10.0


def kl_penalty(
    log_prob: torch.Tensor,
    ref_log_prob: torch.Tensor,
    kind: str = "k3",
    gradient: str = "own",
    behaviour: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per token, with d = log_prob - ref_log_prob: k1 = d, abs = |d|, k2 = d²/2, k3 = exp(-d) + d - 1 with -d clamped
    to ±20 and the result to ±10. ``gradient="k2"`` keeps the value but has the gradient of k2;
    ``"unbiased"`` multiplies by the ratio to the policy that sampled, ``behaviour``, and bounds no result: its mean
    gradient would point away from a reference that finds a token likely. Any shape.
    """
    d = log_prob - ref_log_prob
    if kind == "k1":
        value = d
    elif kind == "abs":
        value = d.abs()
    elif kind == "k2":
        value = d.square() / 2
    elif kind == "k3":
        negative = (-d).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        value = negative.exp() - negative - 1
        value = value if gradient == "unbiased" else value.clamp(-K3_LIMIT, K3_LIMIT)
    else:
        raise ValueError(f"kl kind {kind!r} is not one of k1, abs, k2, k3")
    if gradient == "unbiased":
        assert behaviour is not None
        return value * (log_prob - behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if gradient == "k2":
        k2 = d.square() / 2
        value = k2 - k2.detach() + value.detach()
    return value
