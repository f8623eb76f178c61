"""A loss that balances the experts of a mixture: Fedus et al. 2021, arXiv:2101.03961 (Switch Transformer), eq. 4 to 6,
over all layers together, as transformers counts it; over a whole update, as in Qiu et al. 2025, arXiv:2501.11873.

    E · Σᵢ fᵢ Pᵢ      fᵢ: choices of expert i for each token;   Pᵢ: mean of what the routers give it, which alone learns

The fᵢ of an update are counted in a pass before it: with them the loss is a sum over tokens, and does not depend on how
they are cut into micro-batches or dealt over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.services.modeling.experts import experts_of
from penstock.services.modeling.families import BALANCED
from penstock.services.modeling.packing import Pass, Rows
from penstock.services.modeling.parallel.fsdp import forward, reshard
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.pinned import to_device
from penstock.services.modeling.routing import routers
from penstock.services.runtime import health
from penstock.services.runtime.errors import SetupError


class RouterBalance:
    """Notes what the routers of ``model`` say of tokens, where it is ``asked``. Raises `SetupError` where a model that
    is asked for has no routers that are known."""

    def __init__(self, model: Any, asked: bool) -> None:
        self.asked = asked
        self._noted: list[torch.Tensor] | None = None
        self._factor: torch.Tensor | None = None
        """``[experts]``: what a token's probability of each expert adds to the loss of the update."""
        if not asked:
            return
        found, text = routers(model), model.config.get_text_config()
        if not found or model.config.model_type not in BALANCED:
            raise SetupError(
                f"trainer.algorithm.router_balance: {model.config.model_type} is no mixture of experts whose routers "
                f"are balanced so, which {', '.join(sorted(BALANCED))} are; set it to 0"
            )
        self._experts, self._chosen = experts_of(text), int(text.num_experts_per_tok)
        for router in found:
            router.register_forward_hook(self._note)

    @torch.no_grad()
    def count(self, model: Any, plan: Sequence[tuple[Pass, float]], temperature: float, world: World) -> None:
        """Sees where ``model`` would send the tokens of an update's ``plan``: a forward pass, on all ranks. The step's
        ``temperature`` changes nothing of it."""
        if not self.asked:
            return
        sums = torch.zeros(self._experts + 1, dtype=torch.float64, device=world.device)
        for each, counts_once in plan:
            health.beat()
            rows = each.rows()
            with self._noting() as noted:
                forward(model, rows, temperature)
            weights = _weights(each, rows).double()
            for logits in noted if counts_once else ():
                chosen = logits.topk(self._chosen, -1).indices
                sums.index_add_(0, chosen.flatten(), weights.repeat_interleave(self._chosen))
                sums[-1] += weights.sum()
        reshard(model)
        *counts, tokens = world.sum(sums.tolist())
        found = torch.tensor(counts, dtype=torch.float64) * self._experts / max(tokens, 1.0) ** 2
        self._factor = found.float().to(world.device)

    @contextmanager
    def noting(self, each: Pass, rows: Rows) -> Iterator[dict[str, torch.Tensor]]:
        """Around one forward pass, whose ``rows`` are those of ``each``: behind it there is the pass's share of the
        update's loss, as ``balance``, where it is asked for."""
        found: dict[str, torch.Tensor] = {}
        with self._noting() as noted:
            yield found
        if self.asked:
            weights, factor = _weights(each, rows), self._factor
            # Of a layer what the router says is kept, and not what is made of it.
            terms = [checkpoint(_weighed, logits, weights, factor, use_reentrant=False) for logits in noted]
            found["balance"] = torch.stack(terms).sum()

    @contextmanager
    def _noting(self) -> Iterator[list[torch.Tensor]]:
        self._noted = []
        try:
            yield self._noted
        finally:
            self._noted = None

    def _note(self, _router: nn.Module, _inputs: Any, outputs: Any) -> None:
        if self._noted is not None:  # nor when a layer is computed again for the gradient
            self._noted.append(outputs[0].flatten(0, -2))


def _weighed(logits: torch.Tensor, weights: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return weights @ (logits.float().softmax(-1) @ factor)


def _weights(each: Pass, rows: Rows) -> torch.Tensor:
    """float32 ``[rows * length]``: of how many trajectories each token is, several of which may share a prompt; 0 where
    padded."""
    found, row, at = np.zeros(tuple(rows.tokens.shape), np.float32), 0, 0
    for draft in each.drafts:
        found[row, at : at + draft.prompt] = len(draft.members)
        found[row, at + draft.prompt : at + draft.length] = 1
        row, at = (row, at + draft.length) if each.packed else (row + 1, 0)
    return to_device(torch.from_numpy(found.reshape(-1)), rows.tokens.device)
