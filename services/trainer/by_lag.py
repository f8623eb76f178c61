"""What the age of a token does: how unlike the policy in training those are that older versions sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.services.learning.masked_mean import LOG_RATIO_LIMIT
from penstock.services.modeling.parallel.world import World

SUMS = 5
"""Of each lag: tokens, KL, weights, their squares, clipped tokens."""


@dataclass
class ByLag:
    """Sums over the micro-batches of a step whose oldest token is ``largest`` versions behind."""

    largest: int
    clips: bool
    """The loss clips ratios of tokens."""
    _sums: torch.Tensor | None = None
    """float64 ``[lags, SUMS]``, where they were computed: what is asked for would have to be waited for."""

    @torch.no_grad()
    def add(
        self,
        policy: torch.Tensor,
        behaviour: torch.Tensor,
        lags: torch.Tensor,
        mask: torch.Tensor,
        clipped: torch.Tensor | None,
    ) -> None:
        """Takes log-probabilities of the policy in training and of the one that sampled, and how many versions the
        second is behind, ``[rows, length]``, where the bool ``mask`` is set; ``clipped`` (bool): the ratio is outside
        of the loss's bounds."""
        d = torch.where(mask, policy - behaviour, 0.0).double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        outside = torch.zeros_like(d) if clipped is None else clipped.double()
        values = torch.stack([torch.ones_like(d), d.exp() - d - 1, d.exp(), (2 * d).exp(), outside], -1)
        values = torch.where(mask[..., None], values, 0.0)  # all of them: where the mask is set would be waited for
        found = torch.zeros(self.largest + 1, SUMS, dtype=torch.float64, device=d.device)
        found.index_add_(0, lags.flatten().long().clamp(0, self.largest), values.view(-1, SUMS))
        self._sums = found if self._sums is None else self._sums + found

    def metrics(self, world: World) -> dict[str, float]:
        """Over all ranks, for each lag that tokens have: their share, the KL (k3, nats a token) from the engine to the
        policy, the effective sample size of their importance weights as a share, and the share that is clipped."""
        size = (self.largest + 1) * SUMS
        mine = [0.0] * size if self._sums is None else self._sums.flatten().tolist()
        total = torch.tensor(world.sum(mine), dtype=torch.float64).view(-1, SUMS)
        every, found = float(total[:, 0].sum()), {}
        for lag, (tokens, kl, weight, squares, clipped) in enumerate(total.tolist()):
            if tokens:
                found[f"lag/{lag}/share"] = tokens / every
                found[f"lag/{lag}/kl"] = kl / tokens
                found[f"lag/{lag}/ess"] = weight**2 / (tokens * squares)
                if self.clips:
                    found[f"lag/{lag}/clipped"] = clipped / tokens
        return found
