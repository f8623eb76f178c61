"""What the age of a token does: how unlike the policy in training those are that older versions sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    sums: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sums = torch.zeros(self.largest + 1, SUMS, dtype=torch.float64)

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
        d = (policy - behaviour).double()[mask].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        outside = torch.zeros_like(d) if clipped is None else clipped[mask].double()
        values = torch.stack([torch.ones_like(d), d.exp() - d - 1, d.exp(), (2 * d).exp(), outside], -1)
        found = torch.zeros(self.largest + 1, SUMS, dtype=torch.float64, device=d.device)
        found.index_add_(0, lags[mask].long(), values)
        self.sums += found.cpu()

    def metrics(self, world: World) -> dict[str, float]:
        """Over all ranks, for each lag that tokens have: their share, the KL (k3, nats a token) from the engine to the
        policy, the effective sample size of their importance weights as a share, and the share that is clipped."""
        total = torch.tensor(world.sum(self.sums.flatten().tolist()), dtype=torch.float64).view(-1, SUMS)
        every, found = float(total[:, 0].sum()), {}
        for lag, (tokens, kl, weight, squares, clipped) in enumerate(total.tolist()):
            if tokens:
                found[f"lag/{lag}/share"] = tokens / every
                found[f"lag/{lag}/kl"] = kl / tokens
                found[f"lag/{lag}/ess"] = weight**2 / (tokens * squares)
                if self.clips:
                    found[f"lag/{lag}/clipped"] = clipped / tokens
        return found
