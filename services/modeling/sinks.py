"""Flash attention with sinks (gpt-oss): of each head a score of what holds nothing, and takes its share.

The kernel knows no sinks. Its output is right but for a factor, which the log of the sum of its scores tells; and its
backward pass asks for that log and for the output alone, so it is given those with the sink in them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.attention.varlen  # registers the operations


class FlashWithSinks(torch.autograd.Function):
    """``apply(query, key, value, sinks, cumulative_q, cumulative_k, longest_q, longest_k, scale, window)``: as
    `torch.nn.attention.varlen.varlen_attn` with a causal ``window``, and ``sinks`` ``[heads]``."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor,
        *about: Any,
    ) -> torch.Tensor:
        *places, scale, window = about
        causal = window == (-1, 0)
        gqa = query.shape[1] != key.shape[1]
        found, log_sum, state = torch.ops.torch_attn._varlen_attn(
            query, key, value, *places, causal, scale, list(window), gqa
        )
        whole = torch.logaddexp(log_sum, sinks.float()[:, None])
        found = (found * (log_sum - whole).exp().T[..., None]).to(found.dtype)
        ctx.save_for_backward(query, key, value, sinks, found, whole, state, *places[:2])
        ctx.about = (*places[2:], causal), (scale, list(window))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        query, key, value, sinks, found, whole, state, *places = ctx.saved_tensors
        upstream = gradients[0].contiguous()
        how, more = ctx.about
        own = torch.ops.torch_attn._varlen_attn_backward(
            upstream, query, key, value, found, whole, *places, *how, state, *more
        )
        along = (upstream.float() * found.float()).sum(-1).T  # [heads, tokens]
        of_sinks = -((sinks.float()[:, None] - whole).exp() * along).sum(1)
        return *own, of_sinks.to(sinks.dtype), *(None,) * 6
