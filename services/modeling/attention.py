"""Attention over packed rows: sequences of any lengths one after the other, without a mask and without padding.

On a GPU it is flash attention's variable-length kernel, through torch; elsewhere a loop over the sequences. Where rows
come with a mask instead, it is transformers' own ``sdpa``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from penstock.services.modeling.families import OUR_ATTENTION
from penstock.services.modeling.pinned import to_device


@dataclass(frozen=True)
class Segments:
    """What each token of a packed row attends to.

    Sequence i is the queries ``starts_q[i]:starts_q[i + 1]`` of the row, which are the last ones of the keys
    ``keys[starts_k[i]:starts_k[i + 1]]`` and attend to those and to all keys before their own.
    """

    starts_q: np.ndarray
    """int64 ``[sequences + 1]``; so ``starts_k``. No tuples: FSDP looks at each number of these, in every layer."""
    starts_k: np.ndarray
    keys: torch.Tensor | None
    """int64 ``[keys]``: places in the row. None where they are the row itself: nothing is shared."""
    cumulative_q: torch.Tensor
    """int32 ``[sequences + 1]``: `starts_q` on the row's device; so ``cumulative_k``."""
    cumulative_k: torch.Tensor
    ulysses: Any = None
    """`parallel.sequence.SequenceParallel`, where ranks share the row: each has some of its tokens."""

    @classmethod
    def of(cls, starts_q: list[int], starts_k: list[int], keys: torch.Tensor | None, device: torch.device) -> Segments:
        """On ``device``."""
        q, k = (to_device(torch.tensor(starts, dtype=torch.int32), device) for starts in (starts_q, starts_k))
        return cls(np.array(starts_q), np.array(starts_k), keys, q, k)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' interface: ``query`` ``[rows, heads, length, head size]``, ``key`` and ``value`` with the heads
    of KV; returns ``[rows, length, heads, head size]``. With ``segments`` there is one row."""
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if segments.ulysses:
        q, k, v = segments.ulysses.dealt(int(segments.starts_q[-1]), q, k, v)
    if segments.keys is not None:
        k, v = k[segments.keys], v[segments.keys]
    flash = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    found = (_flash if flash else _loop)(q, k, v, scaling, segments)
    return (segments.ulysses.to_tokens(found) if segments.ulysses else found)[None], None


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, segments: Segments
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest_q, longest_k = (int(np.diff(starts).max()) for starts in (segments.starts_q, segments.starts_k))
    found = varlen_attn(
        q, k, v, segments.cumulative_q, segments.cumulative_k, longest_q, longest_k,
        scale=scaling, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(found, torch.Tensor)
    return found


def _loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, segments: Segments) -> torch.Tensor:
    parts = []
    sequences = (pairwise(starts.tolist()) for starts in (segments.starts_q, segments.starts_k))
    for of_q, of_k in zip(*sequences, strict=True):
        own, keys, values = q[slice(*of_q)], k[slice(*of_k)], v[slice(*of_k)]
        mask, before = None, len(keys) - len(own)
        if before:  # torch's own causal flag would align the queries with the first keys
            mask = torch.ones((len(own), len(keys)), dtype=torch.bool, device=q.device).tril_(before)
        one, two, three = (t.transpose(0, 1)[None] for t in (own, keys, values))
        gqa = q.shape[1] != k.shape[1]
        if gqa and q.is_cuda:  # torch's only kernel that shares heads there makes all scores, and keeps them
            two, three = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (two, three))
            gqa = False
        found = scaled_dot_product_attention(one, two, three, mask, 0.0, mask is None, scale=scaling, enable_gqa=gqa)
        parts.append(found[0].transpose(0, 1))
    return torch.cat(parts)


AttentionInterface.register(OUR_ATTENTION, attend)
AttentionMaskInterface.register(OUR_ATTENTION, sdpa_mask)
