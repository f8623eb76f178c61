"""All-to-all, with a gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def exchange(
    rows: torch.Tensor, group: Any, sent: list[int] | None = None, received: list[int] | None = None
) -> torch.Tensor:
    """``rows`` ``[rows, ...]`` in the order of the ranks that they go to; what came, in the order of those that sent
    it. ``sent`` and ``received``: how many go to each rank and come from it; without them all ranks get as many."""
    found: torch.Tensor = _Exchange.apply(rows.contiguous(), group, sent, received)
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any, sent: list[int] | None, received: list[int] | None) -> Any:
        ctx.way = group, received, sent
        found = torch.empty_like(rows) if received is None else rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(found, rows, received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _Exchange.apply(gradients[0].contiguous(), *ctx.way), None, None, None
