"""The config's three choices as one loss over a micro-batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.protocols.columns import REFERENCE
from penstock.services.runtime.plugins import UserCodeError
from penstock.services.trainer.algorithms.agg_loss import agg_loss
from penstock.services.trainer.algorithms.custom import Choice, CustomChoice
from penstock.services.trainer.algorithms.grpo import grpo
from penstock.services.trainer.algorithms.kl_penalty import kl_penalty
from penstock.services.trainer.algorithms.masked_mean import masked_mean
from penstock.services.trainer.algorithms.ppo_clip import ppo_clip
from penstock.services.trainer.algorithms.truncated import truncated
from penstock.services.trainer.config import AlgorithmConfig, CustomFunction


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
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What the config's choices read, by column: ``[rows, length - 1]``, or ``[rows, 1]``."""


class Algorithm:
    """Advantage, policy loss and correction, as ``config`` names them."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._advantage = _resolve(config.advantage, grpo, "advantage")
        self._loss = _resolve(config.loss, ppo_clip, "loss")
        none = config.correction.type == "none"
        self._correction = None if none else _resolve(config.correction, truncated, "correction")
        self.group_columns = _columns(config.advantage)
        """Columns that the advantage reads, beside the reward."""
        self.columns = [*_columns(config.loss), *_columns(config.correction)]
        """Columns that loss and correction read."""
        if config.kl.coefficient:
            self.columns.append(REFERENCE)
        self.needs_first_pass = bool(getattr(config.correction, "normalize", False))
        """The weights' mean over the step is needed before any loss: `weights` over all parts gives it."""

    def advantages(
        self, scores: torch.Tensor, groups: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """One advantage a trajectory, ``[rows]``, from its reward, its group's number and its `group_columns`."""
        return self._advantage(columns, scores, torch.ones_like(scores)[:, None], groups)[:, 0]

    def weights(self, part: Part) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """The correction's importance weights of a part, not normalised; None where there is no correction."""
        if self._correction is None:
            return None, {}
        return self._correction(part.columns, part.log_prob.detach(), part.behaviour, part.mask)

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
        losses, found = self._loss(part.columns, old, part.log_prob, part.advantages, part.mask, weights)
        metrics |= found
        if config.kl.coefficient:
            kl = kl_penalty(part.log_prob, part.columns[REFERENCE], config.kl.kind, config.kl.gradient)
            losses = losses + config.kl.coefficient * kl
            metrics["reference_kl"] = masked_mean(kl.detach(), part.mask)
        loss = agg_loss(losses, part.mask, config.aggregation, config.length_scale, totals.tokens, totals.sequences)
        return loss, metrics

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradient of ``loss``. Raises `UserCodeError` where a loss of the user's own does not allow it."""
        try:
            loss.backward()
        except RuntimeError as error:
            own = self._config.loss
            if not isinstance(own, CustomFunction) or not re.search(r"in-?place|grad", str(error)):
                raise
            raise UserCodeError(
                f"trainer.algorithm.loss.function: {own.function}: its gradient cannot be computed: {error}"
            ) from error


def _columns(choice: Any) -> list[str]:
    return choice.columns if isinstance(choice, CustomFunction) else []


def _resolve(config: Any, builtin: Callable[..., Any], choice: Choice) -> Callable[..., Any]:
    """The function, to be called with the columns at hand before its own arguments."""
    if isinstance(config, CustomFunction):
        return CustomChoice(config, choice)
    options = config.model_dump(exclude={"type", "normalize"})
    return lambda columns, *arguments: builtin(*arguments, **options)
