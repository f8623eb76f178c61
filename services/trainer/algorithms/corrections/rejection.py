"""Tokens and rows that are left out: Liu et al. 2025, "When Speed Kills Stability"; estimators: Schulman 2020; of
negative advantages alone: DeepSeek-V3.2, arXiv:2512.02556, section 3.1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from penstock.services.learning.masked_mean import LOG_RATIO_LIMIT, masked_mean
from penstock.services.trainer.algorithm_config import RejectRule


def rejection(
    train_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    mask: torch.Tensor,
    rules: Sequence[RejectRule],
    advantages: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mask of what passes all ``rules``; all tensors ``[rows, length]``. With d = train - rollout within ±20, k1 is
    -d, k2 d²/2, k3 exp(d) - 1 - d; a rule of rows compares their sum, mean or maximum over valid tokens, and drops the
    whole row; one for negative advantages only where the advantage is. Metrics: the shares of valid tokens that are
    dropped, and of rows with any that lose one."""
    valid = mask.bool()
    kept = valid.clone()
    d = ((train_log_prob - rollout_log_prob).detach() * valid).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    for rule in rules:
        scope, kind = rule.kind.rsplit("_", 1)
        value = {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - 1 - d}[kind]
        if scope == "seq_sum":
            value = value.sum(-1, keepdim=True)
        elif scope == "seq_mean":
            value = value.sum(-1, keepdim=True) / (valid.sum(-1, keepdim=True) + 1e-8)
        elif scope == "seq_max":
            value = value.masked_fill(~valid, -torch.inf).amax(-1, keepdim=True)
        passes = value <= (math.log(rule.upper) if kind == "k1" else rule.upper)
        if rule.lower is not None:
            passes &= value >= math.log(rule.lower)
        kept &= passes | (advantages >= 0) if rule.of == "negative" else passes
    dropped = valid & ~kept
    metrics = {
        "rejected_tokens": masked_mean(dropped.to(d.dtype), mask),
        "rejected_rows": masked_mean(dropped.any(-1).to(d.dtype), valid.any(-1)),
    }
    return kept, metrics
