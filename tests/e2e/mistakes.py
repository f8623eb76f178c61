"""What users write wrong in ways that only show while a run is under way: the first calls, those of the look before a
run, go well."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

_loss_calls, _reward_calls = itertools.count(), itertools.count()


def policy_gradient(
    old: torch.Tensor, log_prob: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, weights: Any = None
) -> torch.Tensor:
    """A loss that is right."""
    return -(log_prob - old).exp() * advantages


def soon_nan(
    old: torch.Tensor, log_prob: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, weights: Any = None
) -> torch.Tensor:
    """Not finite from its third call on."""
    return policy_gradient(old, log_prob, advantages, mask) * (float("nan") if next(_loss_calls) >= 2 else 1.0)


def once_nan(
    old: torch.Tensor, log_prob: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, weights: Any = None
) -> torch.Tensor:
    """Not finite at its third call."""
    return policy_gradient(old, log_prob, advantages, mask) * (float("nan") if next(_loss_calls) == 2 else 1.0)


def soon_raises(
    old: torch.Tensor, log_prob: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, weights: Any = None
) -> torch.Tensor:
    """Fails from its third call on."""
    if next(_loss_calls) >= 2:
        raise IndexError("the mistake")
    return policy_gradient(old, log_prob, advantages, mask)


def hangs(response: str) -> float:
    """Answers twice, and then never again."""
    if next(_reward_calls) >= 2:
        time.sleep(3600)
    return 0.0


def mostly_fails(response: str, sample: int) -> float:
    """Half of every group has a reward, all the same; none has where nothing was drawn at random, as in an
    evaluation."""
    if sample == 0 and next(_reward_calls) >= 4:  # a look calls it twice for each of two sources
        raise LookupError("no such answer")
    return 0.5
