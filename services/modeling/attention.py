"""Attention over packed rows: sequences of any lengths one after the other, without a mask and without padding.

On a GPU it is flash attention's variable-length kernel, through torch; elsewhere, and for what that kernel does not
know (soft caps, heads of more than 256 numbers, GPUs before Ampere), a loop over the sequences. Where rows come with a
mask instead, it is transformers' own ``sdpa``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from penstock.services.modeling.families import OUR_ATTENTION
from penstock.services.modeling.pinned import to_device
from penstock.services.modeling.sinks import FlashWithSinks
from penstock.services.modeling.state_mixers import Whole

FLASH_HEAD, FLASH_STEP = 256, 8
"""Numbers of the largest head that flash attention's kernel takes, and what they are a multiple of."""
FLASH_CAPABILITY = (8, 0)
"""Ampere, and later."""
WINDOW_BLOCK = 1024
"""Queries that look through a window together, at least: they share a mask."""
SCORE_BYTES = 256 << 20
"""Where scores are made, so many at once."""


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
    whole: Whole
    """How its sequences lie where each is whole."""
    ulysses: Any = None
    """`parallel.sequence.SequenceParallel`, where ranks share the row: each has some of its tokens."""

    @classmethod
    def of(cls, starts_q: list[int], starts_k: list[int], keys: np.ndarray | None, device: torch.device) -> Segments:
        """On ``device``; the arguments are on the host."""
        q, k = np.array(starts_q), np.array(starts_k)
        ours, theirs = (to_device(torch.from_numpy(starts.astype(np.int32)), device) for starts in (q, k))
        places = None if keys is None else to_device(torch.from_numpy(keys), device)
        return cls(q, k, places, ours, theirs, Whole(q, k, keys, device))

    @property
    def device(self) -> torch.device:
        """Of the row."""
        return self.cumulative_q.device

    def to(self, device: torch.device) -> Segments:
        """The same on ``device``, for a row that none shares."""
        keys = None if self.keys is None else self.keys.to(device)
        starts = {name: getattr(self, name).to(device) for name in ("cumulative_q", "cumulative_k")}
        return replace(self, keys=keys, whole=self.whole.to(device), **starts)


@dataclass(frozen=True)
class Way:
    """How a layer attends, beside what its queries, keys and values are."""

    scaling: float | None = None
    window: int | None = None
    """A query sees so many keys, its own the last of them; None: all before it."""
    softcap: float | None = None
    """Scores are drawn below this by a hyperbolic tangent (Gemma 2)."""
    sinks: torch.Tensor | None = None
    """``[heads]``: scores of what holds nothing, and takes its share of the attention (gpt-oss)."""

    @property
    def scored(self) -> bool:
        """torch's own attention does not know it: scores must be made."""
        return self.softcap is not None or self.sinks is not None


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    segments: Segments | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' interface: ``query`` ``[rows, heads, length, head size]``, ``key`` and ``value`` with the heads
    of KV; returns ``[rows, length, heads, head size]``. With ``segments`` there is one row, and ``sliding_window`` is
    heeded; a mask has it in it."""
    way = Way(scaling, sliding_window, softcap, s_aux)
    if segments is None:
        if way.scored:
            return _scored(query, key, value, _added(attention_mask, query, key), way).transpose(1, 2), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if segments.ulysses:
        q, k, v = segments.ulysses.dealt(int(segments.starts_q[-1]), q, k, v)
        way = way if s_aux is None else replace(way, sinks=segments.ulysses.own_heads(s_aux))
    if segments.keys is not None:
        k, v = k[segments.keys], v[segments.keys]
    kernel = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and is_known(q, way) and _has_flash(q.device)
    found = (_flash if kernel else _loop)(q, k, v, way, segments)
    return (segments.ulysses.to_tokens(found) if segments.ulysses else found)[None], None


def is_known(q: torch.Tensor, way: Way) -> bool:
    """Flash attention's kernel can do it."""
    return q.shape[-1] <= FLASH_HEAD and q.shape[-1] % FLASH_STEP == 0 and way.softcap is None


@cache
def _has_flash(device: torch.device) -> bool:
    """This GPU is of those that flash attention's kernel is built for."""
    return torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, way: Way, segments: Segments) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest_q, longest_k = (int(np.diff(starts).max()) for starts in (segments.starts_q, segments.starts_k))
    places = segments.cumulative_q, segments.cumulative_k, longest_q, longest_k
    window = (-1 if way.window is None else way.window - 1, 0)
    size = v.shape[-1]
    if size != q.shape[-1]:  # values of MLA are shorter than keys, which the kernel does not take
        v = pad(v, (0, q.shape[-1] - size))
    if way.sinks is not None:
        found = FlashWithSinks.apply(q, k, v, way.sinks, *places, way.scaling, window)
    else:
        gqa = q.shape[1] != k.shape[1]
        found = varlen_attn(q, k, v, *places, scale=way.scaling, window_size=window, enable_gqa=gqa)
    assert isinstance(found, torch.Tensor)
    return found[..., :size]


def _loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, way: Way, segments: Segments) -> torch.Tensor:
    sequences = (pairwise(starts.tolist()) for starts in (segments.starts_q, segments.starts_k))
    parts = []
    for of_q, of_k in zip(*sequences, strict=True):
        own, keys, values = (each.transpose(0, 1)[None] for each in (q[slice(*of_q)], k[slice(*of_k)], v[slice(*of_k)]))
        for of_own, of_keys in _blocks(of_q[1] - of_q[0], of_k[1] - of_k[0], q.shape[1], way):
            parts.append(_last_of(own[:, :, of_own], keys[:, :, of_keys], values[:, :, of_keys], way)[0])
    return torch.cat([part.transpose(0, 1) for part in parts])


def _blocks(queries: int, keys: int, heads: int, way: Way) -> Iterator[tuple[slice, slice]]:
    """Of ``queries``, the last of so many ``keys``: some at once, and the keys that one of those sees."""
    before, size = keys - queries, queries
    if way.window is not None:
        size = max(way.window, WINDOW_BLOCK)
    if way.scored:
        seen = keys if way.window is None else min(keys, size + way.window)
        size = min(size, max(1, SCORE_BYTES // (4 * heads * seen)))
    for begin in range(0, queries, size):
        end = min(begin + size, queries)
        first = 0 if way.window is None else max(0, before + begin + 1 - way.window)
        yield slice(begin, end), slice(first, before + end)


def _last_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, way: Way) -> torch.Tensor:
    """Attention of ``q`` ``[1, heads, queries, size]``, which are the last of the keys ``k``."""
    queries, keys = q.shape[2], k.shape[2]
    before, narrow = keys - queries, way.window is not None and keys > way.window
    mask: Any = None
    if before and q.is_cuda and not (narrow or way.scored):  # a mask would be kept for the backward, in fp32
        mask = causal_lower_right(queries, keys)
    elif before or narrow or way.scored:  # torch's own causal flag would align the queries with the first keys
        mask = torch.ones((queries, keys), dtype=torch.bool, device=q.device).tril_(before)
        if narrow and way.window is not None:
            mask = mask.triu_(before + 1 - way.window)
    if way.scored:
        if not torch.is_grad_enabled():
            return _scored(q, k, v, mask, way)
        found: torch.Tensor = checkpoint(
            _scored, q, k, v, mask, way, use_reentrant=False, preserve_rng_state=False
        )  # scores are not kept
        return found
    gqa = q.shape[1] != k.shape[1]
    if gqa and q.is_cuda:  # torch's only kernel that shares heads there makes all scores, and keeps them
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        gqa = False
    return scaled_dot_product_attention(q, k, v, mask, 0.0, mask is None, scale=way.scaling, enable_gqa=gqa)


def _scored(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, way: Way) -> torch.Tensor:
    """Attention by its scores, in fp32. ``mask``: bool, or what is added to them."""
    rows, heads, queries, _ = q.shape
    # Heads that share keys and values lie below each other, so that these need not be repeated.
    below = (rows, k.shape[1], heads // k.shape[1] * queries)
    scale = q.shape[-1] ** -0.5 if way.scaling is None else way.scaling
    scores = (q.reshape(*below, -1).float() @ k.float().transpose(-1, -2)).view(rows, heads, queries, -1) * scale
    if way.softcap is not None:
        scores = way.softcap * (scores / way.softcap).tanh()
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min  # not -inf: padding may see nothing at all, and its keys are kept
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if way.sinks is not None:
        sinks = way.sinks.float()[None, :, None, None].expand(rows, -1, queries, 1)
        scores = torch.cat([scores, sinks], -1)
    shares = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return (shares.reshape(*below, -1) @ v).view(rows, heads, queries, -1)


def _added(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """``mask``; transformers leaves a causal one out, which it says by None."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None and queries > 1:
        return torch.ones((queries, keys), dtype=torch.bool, device=query.device).tril_(keys - queries)
    return mask


AttentionInterface.register(OUR_ATTENTION, attend)
AttentionMaskInterface.register(OUR_ATTENTION, sdpa_mask)
