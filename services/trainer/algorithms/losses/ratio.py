"""The ratio of two policies, as losses want it."""

from __future__ import annotations

import torch

from penstock.services.learning.masked_mean import LOG_RATIO_LIMIT, masked_mean


def clamped_log_ratio(log_prob: torch.Tensor, old_log_prob: torch.Tensor) -> torch.Tensor:
    """log_prob - old_log_prob within ±20; its gradient is 0 outside."""
    return (log_prob - old_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def weighted(losses: torch.Tensor, importance_weights: torch.Tensor | None) -> torch.Tensor:
    """``losses``, times the correction's weights where there are any."""
    return losses if importance_weights is None else losses * importance_weights


def share(condition: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Of the valid tokens, those where ``condition`` holds."""
    return masked_mean(condition.to(torch.float32 if mask.dtype == torch.bool else mask.dtype), mask)


def sequence_log_ratio(log_prob: torch.Tensor, old_log_prob: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum of a row's log_prob - old_log_prob over its valid tokens, within ±20 and without gradient; ``[rows,
    1]``."""
    summed = ((log_prob - old_log_prob).detach() * mask).sum(-1, keepdim=True)
    return summed.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
