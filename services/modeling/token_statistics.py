"""What a distribution over the next token says: of the token that was chosen, and of itself."""

from __future__ import annotations

from typing import Literal

import torch

from penstock.services.modeling.taught import Taught

Statistic = Literal["log_prob", "entropy", "squares", "divergence"]


def token_statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    candidates: torch.Tensor | None = None,
    wanted: tuple[Statistic, ...] = ("log_prob",),
    taught: Taught | None = None,
) -> torch.Tensor:
    """``[wanted, tokens]``, float32 or wider, differentiable: the log-probability of each of ``targets`` ``[tokens]``
    under ``logits`` ``[tokens, vocabulary]`` at ``temperature``, the distribution's entropy in nats, and the sum of its
    squared probabilities. ``candidates`` ``[tokens, most]``: what the sampler chose each token from, padded with -1;
    the distribution then is over these, unless there are none. Its divergence from ``taught`` is over the whole
    vocabulary always, as a teacher's is."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature not in (0.0, 1.0):  # a division by 1 reads and writes all of them
        logits = logits / temperature
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    every = _Distribution(logits)
    some = over_some = None
    if candidates is not None:
        some = (candidates >= 0).any(-1)
        over = logits.gather(-1, candidates.clamp(min=0)).masked_fill(candidates < 0, -torch.inf)
        over_some = _Distribution(over.masked_fill(~some[:, None], 0.0))
    found = []
    for name in wanted:
        if name == "divergence":
            assert taught is not None, "it is from what teachers say"
            found.append(taught.divergence(logits, every.of("log_prob")))
            continue
        value = every.of(name)
        if over_some is not None and some is not None:
            value = torch.where(some, over_some.of(name), value)
        found.append(chosen - value if name == "log_prob" else value)
    return torch.stack(found)


class _Distribution:
    """The softmax of ``logits`` ``[tokens, outcomes]``, some of which may be -inf."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits, self._total = logits, logits.logsumexp(-1)

    def of(self, name: Statistic) -> torch.Tensor:
        """``[tokens]``; for ``log_prob`` what is taken off the chosen token's logit."""
        if name == "log_prob":
            return self._total
        logs = self._logits - self._total[:, None]
        if name == "squares":
            return (2 * logs).exp().sum(-1)
        return -(logs.exp() * logs.masked_fill(logs == -torch.inf, 0.0)).sum(-1)
