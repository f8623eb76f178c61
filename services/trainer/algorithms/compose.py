"""The config's three choices as one loss over a micro-batch."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from penstock.protocols.columns import GOOD, LAGS, PICKED, REFERENCE, SAMPLED, SCORES, SESSIONS, UNDECIDED
from penstock.services.learning.kl_penalty import kl_penalty
from penstock.services.learning.masked_mean import masked_mean
from penstock.services.learning.token_returns import on_last_token, whiten
from penstock.services.runtime.plugins import UserCodeError
from penstock.services.trainer.algorithm_config import AlgorithmConfig, CustomFunction
from penstock.services.trainer.algorithms.advantages.branches import by_session
from penstock.services.trainer.algorithms.advantages.distillation import gain
from penstock.services.trainer.algorithms.agg_loss import agg_loss
from penstock.services.trainer.algorithms.corrections.rejection import rejection
from penstock.services.trainer.algorithms.corrections.weights import SHARES, mean_terms, spread
from penstock.services.trainer.algorithms.custom import CustomChoice, Place
from penstock.services.trainer.algorithms.divergence import divergence
from penstock.services.trainer.algorithms.totals import Totals
from penstock.services.trainer.choice import Choice

SUMMED = ("imitated_nll", "given_nll", "teacher_divergence", "router_balance")
"""Metrics of which each part has its share, not a mean."""
WEIGHT = "is_weight_"
"""What the names of a correction's metrics begin with."""


@dataclass(frozen=True)
class Part:
    """One micro-batch; tensors ``[rows, length - 1]``, float but for the mask (bool)."""

    log_prob: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What the config's choices read, by column: ``[rows, length - 1]``, or ``[rows, 1]``."""
    proximal: torch.Tensor | None = None
    """Of the policy that the step began with; None where that is the present one."""
    entropy: torch.Tensor | None = None
    """Of each token's distribution, in nats; where the algorithm `wants_entropy`."""
    given: torch.Tensor | None = None
    """bool: tokens that were given, none of which is in `mask`; None where the step has none."""
    sampled: bool = True
    """Something is in `mask`; said here, since who looks waits for the device."""
    divergence: torch.Tensor | None = None
    """Of each token's distribution from the teachers', in nats; where the algorithm has any."""
    tokens: torch.Tensor | None = None
    """``[rows]``: tokens of the step in all branches of a row's session; None: those of the row."""
    balance: torch.Tensor | None = None
    """A number: the part's share of the loss that balances experts; where the algorithm has that."""

    @property
    def policy(self) -> torch.Tensor:
        """Log-probabilities of the policy that the step began with, without gradient."""
        return self.log_prob.detach() if self.proximal is None else self.proximal


class Algorithm:
    """Advantage, policy loss and correction, as ``config`` names them."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._advantage = None if config.advantage.type == "none" else _resolve(config.advantage, "advantage")
        self._own_advantage = isinstance(config.advantage, CustomFunction)
        self._loss = _resolve(config.loss, "loss")
        none = config.correction.type == "none"
        self._correction = None if none else _resolve(config.correction, "correction")
        term = config.teacher_advantage
        self.group_columns = list(dict.fromkeys([*config.advantage.columns, *(term.teachers if term else ())]))
        """Columns that advantages are made of, beside the reward."""
        self.given = config.advantage.given
        self.wants_entropy = config.entropy_bonus > 0 or config.entropy_control is not None
        """Parts have their entropy, with its gradient."""
        self.entropy_bonus = config.entropy_bonus
        """What a nat of it takes off the loss: of an update, where it is steered (`entropy_control`)."""
        self.given_coefficient = config.given.coefficient
        """What the loss of given answers counts: in an update, where that changes."""
        self.teachers = config.distill.teachers if config.distill else {}
        """Parts have their divergence from these, with its gradient."""
        self.columns = [*config.loss.columns, *config.loss.given, *config.correction.columns]
        self._interpolates = config.ratio == "interpolated"
        if config.loss.reads_lags or self._interpolates:
            self.columns.append(LAGS)
        """Columns that loss and correction read, and what the loss is given beside."""
        self.clips_tokens = config.loss.clips_tokens
        self.picks = PICKED in config.loss.given
        """The loss treats some tokens of an update in another way: `pick` says which."""
        self.entropy_share = config.entropy_share
        if self.entropy_share < 1:
            self.columns.append(UNDECIDED)
        self._imitates = config.imitate.coefficient > 0
        if self._imitates:
            self.columns.append(GOOD)
        self._in_loss = config.kl.coefficient > 0 and not config.kl.in_reward
        if self._in_loss:
            self.columns.append(REFERENCE)
        self.needs_first_pass = bool(getattr(config.correction, "normalize", False))
        """The weights' mean over the step is needed before any loss: `weights` over all parts gives it."""

    def start(self, part: Part) -> torch.Tensor:
        """Log-probabilities of the policy that the step began with, without gradient; or what stands for them: version
        s - l has sampled a token of lag l, and version s + 1 is in the making, so version s is taken to lie l of l + 1
        parts of the way from the first to the second (A-3PO, arXiv:2512.06547, eq. 3)."""
        if not self._interpolates:
            return part.policy
        lags = part.columns[LAGS].to(part.behaviour.dtype)
        return part.behaviour + lags / (lags + 1) * (part.log_prob.detach() - part.behaviour)

    def denominator(self, part: Part) -> torch.Tensor:
        """What the loss's ratio divides by, as log-probabilities."""
        return part.behaviour if self._config.ratio == "behaviour" else self.start(part)

    def clipped(self, part: Part) -> torch.Tensor | None:
        """bool: tokens whose ratio is outside of the loss's bounds; None where it has none for tokens."""
        loss = self._config.loss
        if not loss.clips_tokens:
            return None
        ratio = (part.log_prob.detach() - self.denominator(part)).exp()
        width = (1 + part.columns[LAGS]) ** -loss.lag_exponent if loss.reads_lags else 1.0  # type: ignore[union-attr]
        return (ratio < 1 - loss.clip_low * width) | (ratio > 1 + loss.clip_high * width)  # type: ignore[union-attr]

    def advantages(
        self,
        scores: torch.Tensor,
        mask: torch.Tensor,
        groups: torch.Tensor,
        columns: Mapping[str, torch.Tensor],
        tokens: torch.Tensor | None = None,
        sessions: torch.Tensor | None = None,
        learned: np.ndarray | None = None,
        alone: np.ndarray | None = None,
    ) -> torch.Tensor:
        """An advantage a token, ``[rows, length]``, 0 where ``mask`` (bool, so shaped) is not set; from each row's
        reward, its group's number and its `group_columns`. ``tokens`` ``[rows, length]`` says where in a row its reward
        lies; None: on the last token. ``sessions`` ``[rows]``: rows with the same number are branches of one session,
        which a built-in advantage of whole rows compares as one; None: each row is its own. ``learned`` bool
        ``[rows]``: those whose advantages the policy learns from, which alone have a part in what is whitened (others
        are 0 then); None: all. ``alone`` bool ``[rows]``: those that are left of a group, whose reward is compared with
        nobody's, and says nothing; None: none is."""
        mask = mask.to(scores.dtype)
        counted = mask if learned is None or learned.all() else mask * torch.from_numpy(learned)[:, None]
        there: Any = slice(None)
        if alone is not None and alone.any():
            there = torch.from_numpy(np.flatnonzero(~alone))
        found = torch.zeros_like(mask)
        if alone is None or not alone.all():
            some = {name: values[there] for name, values in columns.items()}
            of = scores[there], mask[there], groups[there], some
            found[there] = self._compared(*of, *(None if each is None else each[there] for each in (tokens, sessions)))
            if self._config.advantage.whitens and counted is not mask:  # once more, of those that count
                found[there] = whiten(found[there], counted[there])
        if (term := self._config.teacher_advantage) is not None:
            found, there = found + term.coefficient * self.taught(columns, mask).to(found.dtype), slice(None)
        if self._config.whiten:
            found[there] = whiten(found[there], counted[there])
        bound = self._config.advantage_bound
        return found if bound is None else found.clamp(-bound, bound)

    def taught(self, columns: Mapping[str, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        """What teachers say beside the advantage, in nats: see `distillation.gain`; as `advantages`."""
        assert self._config.teacher_advantage
        teachers = self._config.teacher_advantage.teachers
        return gain([columns[name] for name in teachers], list(teachers.values()), columns[SAMPLED], mask)

    def teacher_kl(self, columns: Mapping[str, torch.Tensor], mask: torch.Tensor) -> float:
        """The mean of what `taught` gives, turned, over the tokens that some teacher was asked for."""
        assert self._config.teacher_advantage
        asked = torch.stack([~columns[name].isnan() for name in self._config.teacher_advantage.teachers]).any(0)
        return float(masked_mean(-self.taught(columns, mask), mask * asked))

    def _compared(
        self,
        scores: torch.Tensor,
        mask: torch.Tensor,
        groups: torch.Tensor,
        columns: Mapping[str, torch.Tensor],
        tokens: torch.Tensor | None,
        sessions: torch.Tensor | None,
    ) -> torch.Tensor:
        """What the advantage itself says; as `advantages`."""
        if self._advantage is None:
            return torch.zeros_like(mask)
        if self._config.advantage.by_token:
            alone = torch.arange(len(scores)) if sessions is None else sessions
            columns = {**columns, SCORES: scores, SESSIONS: alone}
            scores = on_last_token(scores, mask) if tokens is None else tokens
        elif sessions is not None and len(torch.unique(sessions)) < len(scores) and not self._own_advantage:
            return by_session(self._advantage, columns, scores, mask, groups, sessions)
        return self._advantage(columns, scores, mask, groups)

    def pick(
        self, log_prob: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, seed: int
    ) -> torch.Tensor:
        """bool ``[rows, length]``: what the loss picks of all tokens of an update, on the host; the same for the same
        ``seed``."""
        assert isinstance(self._config.loss, Choice)
        found = _function(self._config.loss.picks_by)
        generator = torch.Generator().manual_seed(seed)
        return found(old, log_prob, advantages, mask, generator, **self._config.loss.picking())

    def compare(self, teacher: torch.Tensor, policy: torch.Tensor) -> torch.Tensor:
        """The divergence that `trainer.algorithm.distill` names: see `divergence.divergence`."""
        assert self._config.distill
        return divergence(teacher, policy, self._config.distill.divergence, self._config.distill.beta)

    def weights(self, part: Part) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """The correction's importance weights of a part, not normalised; None where there is no correction."""
        if self._correction is None:
            return None, {}
        return self._correction(part.columns, self.start(part), part.behaviour, part.mask)

    def mean_terms(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """What a part adds to the sum and to the count of the weights' mean over the step."""
        weights, _ = self.weights(part)
        assert weights is not None
        return mean_terms(weights, part.mask, getattr(self._config.correction, "level", "token"))

    def loss(
        self, part: Part, totals: Totals, mean_weight: float = 1.0
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The part's share of the step's loss; all parts' shares add up to it. Metrics are means over the part, but for
        `SUMMED`."""
        loss: torch.Tensor = (part.log_prob * 0).sum()  # with a backward, though nothing is learned from the part
        metrics: dict[str, torch.Tensor] = {}
        if totals.tokens and part.sampled:
            loss, metrics = self._sampled_loss(part, totals, mean_weight)
        if self._imitates:
            mask = part.mask
            if part.given is not None and self._config.given.as_sampled:
                mask = mask | part.given
            good = _unlikely(part.log_prob, mask * part.columns[GOOD], totals.good)
            loss = loss + self._config.imitate.coefficient * good
            metrics |= {"imitated_nll": good.detach()} if totals.good else {}
        if part.given is not None:
            nll = _unlikely(part.log_prob, part.given, totals.given)
            loss, metrics["given_nll"] = loss + self._given_loss(part, nll, totals), nll.detach()
        if part.divergence is not None:
            learned = part.mask if part.given is None or not self._teaches_given else part.mask | part.given
            metrics["teacher_divergence"] = (part.divergence.detach() * learned).sum() / max(totals.taught, 1.0)
        if part.balance is not None:
            loss = loss + self._config.router_balance * part.balance
            metrics["router_balance"] = part.balance.detach()
        return loss, metrics

    def _given_loss(self, part: Part, nll: torch.Tensor, totals: Totals) -> torch.Tensor:
        """Of given tokens; ``nll`` is their negative log-likelihood, as far as the part has it."""
        config, how = self._config, self._config.given
        if how.shape == "nll":
            return self.given_coefficient * nll
        assert part.given is not None
        if how.shape == "chord":
            probability = part.log_prob.detach().exp()
            weight = probability * (1 - probability)
            return self.given_coefficient * _unlikely(part.log_prob * weight, part.given, totals.given)
        if self._teaches_given:
            assert config.distill and part.divergence is not None
            losses = config.distill.coefficient * part.divergence
        elif how.shape == "reinforce":
            losses = -part.advantages * part.log_prob
        else:
            probability = part.log_prob.exp()
            losses = -part.advantages * probability / (probability + how.gamma)
        divided = config.aggregated, config.length_scale, *self._counts(totals)
        return self.given_coefficient * agg_loss(losses, part.given, *divided)

    @property
    def _teaches_given(self) -> bool:
        return self._config.given.shape == "distill"

    def _counts(self, totals: Totals) -> tuple[float, float]:
        """Tokens and sequences that losses are divided by: a mean weighed by advantages, and a teacher's, is over
        sampled and given ones together."""
        if self._config.given.weighed or self._teaches_given:
            return totals.tokens + totals.given, totals.sequences + totals.given_rows
        return totals.tokens, totals.sequences

    def _sampled_loss(
        self, part: Part, totals: Totals, mean_weight: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Of what the policy has sampled; as `loss`."""
        config = self._config
        weights, metrics = self.weights(part)
        if getattr(config.correction, "level", "token") == "sequence":
            metrics |= {name: _over_rows(metrics[name], part, totals) for name in SHARES if name in metrics}
        metrics = {f"{WEIGHT}{name}": value for name, value in metrics.items()}
        if weights is not None:
            weights = weights / mean_weight
        old = self.denominator(part)
        losses, found = self._loss(part.columns, old, part.log_prob, part.advantages, part.mask, weights)
        metrics |= found
        if config.reject:
            kept, found = rejection(part.policy, part.behaviour, part.mask, config.reject, part.advantages)
            losses = losses * kept
            metrics |= found | {"rejected_rows": _over_rows(found["rejected_rows"], part, totals)}
        if self.entropy_share < 1:
            losses = losses * part.columns[UNDECIDED]
        if self._in_loss:
            reference, how = part.columns[REFERENCE], config.kl
            kl = kl_penalty(part.log_prob, reference, how.kind, how.gradient, part.behaviour)
            losses = losses + config.kl.coefficient * kl
            metrics["reference_kl"] = masked_mean(kl.detach(), part.mask)
        if config.sampler_penalty:
            losses = losses + config.sampler_penalty * (part.log_prob - part.behaviour).square()
        if part.entropy is not None:
            losses = losses - self.entropy_bonus * part.entropy
            metrics["entropy"] = masked_mean(part.entropy.detach(), part.mask)
        if part.divergence is not None and config.distill:
            losses = losses + config.distill.coefficient * part.divergence
        counts = *self._counts(totals), part.tokens
        loss = agg_loss(losses, part.mask, config.aggregated, config.length_scale, *counts)
        return loss, metrics

    def finished(self, metrics: dict[str, float]) -> dict[str, float]:
        """``metrics`` of a whole step, from the means over its parts: with what is no mean itself."""
        found = dict(metrics)
        if isinstance(self._config.correction, CustomFunction) or f"{WEIGHT}square" not in found:
            return found
        square = found.pop(f"{WEIGHT}square")
        return found | {f"{WEIGHT}{name}": value for name, value in spread(found[f"{WEIGHT}mean"], square).items()}

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


def _unlikely(log_prob: torch.Tensor, mask: torch.Tensor, tokens: float) -> torch.Tensor:
    """A part's share of the mean of −log π over so many ``tokens`` of the step, those of the ``mask`` in the part."""
    return -(log_prob * mask).sum() / max(tokens, 1.0)


def _over_rows(share: torch.Tensor, part: Part, totals: Totals) -> torch.Tensor:
    """``share`` of a part's rows, so that the mean over parts, weighed by their tokens, is that of the step's rows."""
    rows, tokens = part.mask.any(-1).sum(), part.mask.sum().clamp(min=1)
    return share * rows / tokens * (totals.tokens / totals.rows)


def _resolve(config: Choice | CustomFunction, place: Place) -> Callable[..., Any]:
    """The function, to be called with the columns at hand before its own arguments."""
    if isinstance(config, CustomFunction):
        return CustomChoice(config, place)
    function = _function(config.implementation)
    options = config.options()
    if place == "correction":  # is done by `Algorithm.loss`, with the mean over the whole step
        options.pop("normalize")
    names = [*config.columns, *([LAGS] if config.reads_lags else []), *config.given]
    return lambda columns, *arguments: function(*arguments, *(columns[name] for name in names), **options)


def _function(implementation: str) -> Callable[..., Any]:
    module, _, name = implementation.partition(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)
