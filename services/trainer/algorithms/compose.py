"""The config's three choices as one loss over a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from penstock.services.runtime.errors import SetupError
from penstock.services.trainer.algorithms.agg_loss import agg_loss
from penstock.services.trainer.algorithms.grpo import grpo
from penstock.services.trainer.algorithms.kl_penalty import kl_penalty
from penstock.services.trainer.algorithms.masked import masked_mean
from penstock.services.trainer.algorithms.ppo_clip import ppo_clip
from penstock.services.trainer.algorithms.truncated import truncated
from penstock.services.trainer.config import AlgorithmConfig, CustomFunction


class AlgorithmError(SetupError):
    """A custom function that cannot be loaded; says which."""


@dataclass(frozen=True)
class Totals:
    """Counts over the whole step, by which the parts' losses are divided."""

    tokens: float
    sequences: float


@dataclass(frozen=True)
class Part:
    """One micro-batch; tensors ``[rows, length - 1]``, float but for the mask (bool)."""

    log_prob: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    reference: torch.Tensor | None = None


class Algorithm:
    """Advantage, policy loss and correction, as ``config`` names them."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._advantage = _resolve(config.advantage, grpo)
        self._loss = _resolve(config.loss, ppo_clip)
        self._correction = None if config.correction.type == "none" else _resolve(config.correction, truncated)
        self.needs_first_pass = bool(getattr(config.correction, "normalize", False))
        """The weights' mean over the step is needed before any loss: `weights` over all parts gives it."""

    def advantages(self, scores: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """One advantage a trajectory, ``[rows]``, from its reward and its group's number."""
        return self._advantage(scores, torch.ones_like(scores)[:, None], groups)[:, 0]

    def weights(self, part: Part) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """The correction's importance weights of a part, not normalised; None where there is no correction."""
        if self._correction is None:
            return None, {}
        return self._correction(part.log_prob.detach(), part.behaviour, part.mask)

    def loss(
        self, part: Part, totals: Totals, mean_weight: float = 1.0
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The part's share of the step's loss; all parts' shares add up to it. Metrics are means over the part."""
        config = self._config
        weights, metrics = self.weights(part)
        metrics = {f"is_weight_{name}": value for name, value in metrics.items()}
        if weights is not None:
            weights = weights / mean_weight
        old = part.behaviour if config.ratio == "behaviour" else part.log_prob.detach()
        losses, found = self._loss(old, part.log_prob, part.advantages, part.mask, weights)
        metrics |= found
        if part.reference is not None and config.kl.coefficient:
            kl = kl_penalty(part.log_prob, part.reference, config.kl.kind, config.kl.gradient)
            losses = losses + config.kl.coefficient * kl
            metrics["reference_kl"] = masked_mean(kl.detach(), part.mask)
        loss = agg_loss(losses, part.mask, config.aggregation, config.length_scale, totals.tokens, totals.sequences)
        return loss, metrics


def _resolve(config: Any, builtin: Callable[..., Any]) -> Callable[..., Any]:
    options = config.model_dump(exclude={"type", "normalize"})
    if not isinstance(config, CustomFunction):
        return lambda *arguments: builtin(*arguments, **options)
    module, _, name = config.function.partition(":")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise AlgorithmError(
            f"trainer.algorithm: cannot load {config.function!r} as module:function: {error}"
        ) from error
    return lambda *arguments: function(*arguments, **config.options)
