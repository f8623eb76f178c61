"""Drawing tokens with random numbers that depend on nothing but seed, group, sample and position."""

from __future__ import annotations

import numpy as np
import torch

FIRST = 1024
"""Of a large vocabulary so many tokens are looked at first for those that have `top_p` of the probability."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def mix(value: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele et al. 2014): uint64 ``[rows]`` to well-mixed uint64 ``[rows]``."""
    with np.errstate(over="ignore"):
        value = value + _GOLDEN
        value = (value ^ (value >> np.uint64(30))) * _MIX_A
        value = (value ^ (value >> np.uint64(27))) * _MIX_B
        return value ^ (value >> np.uint64(31))


def stream_key(seed: int, number: int, sample: int) -> np.uint64:
    """The key of one trajectory's random numbers."""
    key = np.array([0], np.uint64)
    for part in (seed, number, sample):
        key = mix(key ^ np.array([part & (2**64 - 1)], np.uint64))
    return key[0]


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each row, from its key (uint64 ``[rows]``) and position (int ``[rows]``); float64."""
    mixed = mix(keys ^ mix(positions.astype(np.uint64)))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
    uniform: torch.Tensor,
    masked: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    likeliest: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Draws one token a row from ``logits`` (float32 ``[rows, vocabulary]``).

    ``temperature`` float32 ``[rows]``, 0 for greedy; ``top_p`` and ``min_p`` float32 and ``top_k`` int64
    ``[rows]``, None where no row truncates so; ``likeliest``: no row with a top_p below 1 or a top_k draws from
    more tokens than these (the largest top_k), None: it may from all; ``uniform`` float32 ``[rows]`` in [0, 1).
    Returns tokens int64 ``[rows]`` and their log-probabilities float32 ``[rows]`` under the tempered, untruncated
    distribution (greedy rows: temperature 1). For rows where ``masked`` (bool ``[rows]``) is set they are those of
    the truncated one, and the third tensor, bool ``[rows, vocabulary]``, says what it kept; None without
    ``masked``.
    """
    greedy = temperature == 0
    logs = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature)[:, None], -1)
    probabilities = logs.exp()
    if top_p is not None or top_k is not None or min_p is not None:
        probabilities = _truncate(probabilities, top_p, top_k, min_p, likeliest)
    cumulative = _cumulative(probabilities)
    threshold = uniform[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, logits.argmax(-1), drawn)
    found = logs.gather(-1, tokens[:, None]).squeeze(-1)
    if masked is None:
        return tokens, found, None
    kept = probabilities > 0
    over_kept = found - logs.masked_fill(~kept, -torch.inf).logsumexp(-1)
    return tokens, torch.where(masked & ~greedy, over_kept, found), kept


def _cumulative(values: torch.Tensor) -> torch.Tensor:
    """Running sums over the last dimension. CUDA has no deterministic ones for floats: the host makes them then."""
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return values.cpu().cumsum(-1).to(values.device)
    return values.cumsum(-1)


def _truncate(
    probabilities: torch.Tensor, top_p: torch.Tensor | None, top_k: torch.Tensor | None, min_p: torch.Tensor | None,
    likeliest: int | None,
) -> torch.Tensor:  # fmt: skip
    """Zeroes what these leave out, in vLLM's order: min-p, then top-k, then top-p, for which a token stays while the
    more likely ones together are below that share of all that is left. No more are ranked than may stay: to sort a
    vocabulary takes longer than many a model."""
    if min_p is not None:
        least = min_p[:, None] * probabilities.amax(-1, keepdim=True)
        probabilities = torch.where(probabilities >= least, probabilities, 0.0)
    if top_p is None and top_k is None:
        return probabilities
    size, every = probabilities.shape[-1], probabilities.sum(-1, keepdim=True)
    if likeliest is None and top_k is None and size > 4 * FIRST:  # a thousand tokens have nearly always enough
        likeliest = FIRST
    ranked, order = _rank(probabilities, likeliest or size)
    if top_p is not None and top_k is None and not bool(((ranked.sum(-1) >= top_p * every[:, 0]) | (top_p >= 1)).all()):
        likeliest = None
        ranked, order = _rank(probabilities, size)
    if top_k is not None:
        place = torch.arange(ranked.shape[-1], device=ranked.device)[None]
        ranked = torch.where((top_k[:, None] == 0) | (place < top_k[:, None]), ranked, 0.0)
    if top_p is not None:
        running = _cumulative(ranked)
        left = every if top_k is None else running[:, -1:]
        kept = running - ranked < top_p[:, None] * left
        ranked = torch.where(kept | (top_p[:, None] >= 1), ranked, 0.0)
    kept = torch.zeros_like(probabilities).scatter_(-1, order, ranked)
    if likeliest is None:
        return kept
    whole = torch.ones_like(probabilities[:, 0], dtype=torch.bool) if top_k is None else top_k == 0
    return torch.where((whole if top_p is None else whole & (top_p >= 1))[:, None], probabilities, kept)


def _rank(probabilities: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` likeliest of each row, the likeliest first, and their ids. Of equal ones, as 16 bits have many, the
    lower id goes before, so that what a row keeps follows from that row alone, whoever is beside it."""
    if count >= probabilities.shape[-1]:
        return probabilities.sort(dim=-1, descending=True, stable=True)
    least = probabilities.topk(count).values[:, -1:]
    wanted = probabilities >= least
    if bool((wanted.sum(-1) > count).any()):
        above, equal = probabilities > least, probabilities == least
        wanted = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= count - above.sum(-1, keepdim=True)))
    order = wanted.nonzero()[:, 1].view(len(probabilities), count)
    ranked, place = probabilities.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return ranked, order.gather(-1, place)
