"""Divergence proximal policy optimization: DPPO 2026, arXiv:2602.04879."""

from __future__ import annotations

import torch

from penstock.services.learning.masked_mean import masked_mean
from penstock.services.trainer.algorithms.losses.ratio import clamped_log_ratio, share, weighted


def dppo_tv(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_weights: torch.Tensor | None = None,
    *,
    threshold_low: float,
    threshold_high: float,
    ratio_cap: float = 20.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token losses -A min(r, ratio_cap) log_prob, the ratio a constant, of tokens whose probability p has not moved too
    far in the advantage's direction: p_new - p_old <= threshold_high for positive advantages, else >= -threshold_low.
    All tensors ``[rows, length]``."""
    moved = log_prob.detach().exp() - old_log_prob.exp()
    keep = torch.where(advantages > 0, moved <= threshold_high, moved >= -threshold_low)
    return _kept(old_log_prob, log_prob, advantages, mask, importance_weights, keep, ratio_cap)


def dppo_kl(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_weights: torch.Tensor | None = None,
    *,
    threshold_low: float,
    threshold_high: float,
    ratio_cap: float = 20.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """As `dppo_tv`, by the divergence of old from new over two outcomes, the token and any other: within threshold_high
    for positive advantages, else threshold_low; or moved against the advantage's direction."""
    new = log_prob.detach()
    before, after = old_log_prob.exp(), new.exp()
    others = (1 - before) * ((1 - before + 1e-8).log() - (1 - after + 1e-8).log())
    divergence = before * (old_log_prob - new) + others
    positive = advantages > 0
    within = divergence <= torch.where(positive, threshold_high, threshold_low)
    against = torch.where(positive, after <= before, after >= before)
    return _kept(old_log_prob, log_prob, advantages, mask, importance_weights, within | against, ratio_cap)


def _kept(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_weights: torch.Tensor | None,
    keep: torch.Tensor,
    ratio_cap: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    log_ratio = clamped_log_ratio(log_prob, old_log_prob).detach()
    ratio = log_ratio.exp()
    losses = -advantages * ratio.clamp(max=ratio_cap) * keep * log_prob
    metrics = {
        "masked_fraction": share(~keep, mask),
        "cap_fraction": share(keep & (ratio > ratio_cap), mask),
        "approx_kl": masked_mean(-log_ratio, mask),
    }
    return weighted(losses, importance_weights), metrics
