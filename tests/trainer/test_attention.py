"""Attention over packed rows is that of each sequence by itself, whatever a family does to its scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.services.modeling import attention
from penstock.services.modeling.attention import Segments, Way, attend
from penstock.services.modeling.sinks import FlashWithSinks

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE, OF_VALUES = 4, 2, 8, 6


def segments_of(prompts: list[tuple[int, list[int]]], device: torch.device = CPU) -> tuple[Segments, list[list[int]]]:
    """Rows of a prompt's length and its responses', one after the other; and of each sequence the places of its keys,
    of which its queries are the last."""
    starts_q, starts_k, keys, every = [0], [0], [], []
    at = 0
    for prompt, responses in prompts:
        own = list(range(at, at + prompt))
        for begin, size in ((at, prompt), *((-1, response) for response in responses)):
            before = [] if begin >= 0 else own
            places = [*before, *range(starts_q[-1], starts_q[-1] + size)]
            starts_q.append(starts_q[-1] + size)
            starts_k.append(starts_k[-1] + len(places))
            keys += places
            every.append(places)
        at = starts_q[-1]
    shared = None if starts_q == starts_k else np.array(keys)
    return Segments.of(starts_q, starts_k, shared, device), every


def wanted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, every: Any, way: Way) -> torch.Tensor:
    """Query by query, by the definition."""
    parts = []
    for number, places in enumerate(every):
        first, end = segments.starts_q[number : number + 2].tolist()
        for query in range(first, end):
            seen = places[: len(places) - (end - query) + 1]
            seen = seen if way.window is None else seen[-way.window :]
            of_heads = []
            for head in range(HEADS):
                theirs = head * KV_HEADS // HEADS
                scores = (k[seen, theirs] @ q[query, head]) * (way.scaling or SIZE**-0.5)
                scores = scores if way.softcap is None else way.softcap * torch.tanh(scores / way.softcap)
                scores = scores if way.sinks is None else torch.cat([scores, way.sinks[head : head + 1]])
                of_heads.append(scores.softmax(0)[: len(seen)] @ v[seen, theirs])
            parts.append(torch.stack(of_heads))
    return torch.stack(parts)


WAYS = st.builds(
    dict,
    scaling=st.sampled_from([None, 0.3]),
    window=st.sampled_from([None, 1, 3, 100]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
)
ROWS = st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(1, 9), max_size=3)), min_size=1, max_size=3)


def tensors(segments: Segments, kv_size: int = OF_VALUES) -> list[torch.Tensor]:
    """Query, key, value and sinks, of a row."""
    generator = torch.Generator().manual_seed(0)
    length = int(segments.starts_q[-1])
    shapes = ((length, HEADS, SIZE), (length, KV_HEADS, SIZE), (length, KV_HEADS, kv_size), (HEADS,))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@settings(deadline=None, max_examples=60)
@given(rows=ROWS, told=WAYS, block=st.integers(1, 4))
def test_a_packed_row_is_attended_to_as_the_family_says(
    rows: list[tuple[int, list[int]]], told: dict[str, Any], block: int
) -> None:
    segments, every = segments_of(rows)
    q, k, v, sinks = tensors(segments)
    way = Way(**told | {"sinks": sinks if told["sinks"] else None})
    taken = [q, k, v, sinks] if told["sinks"] else [q, k, v]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "WINDOW_BLOCK", block)
        patch.setattr(attention, "SCORE_BYTES", 4 * HEADS * 9 * block)
        found = attend(
            torch.nn.Module(), *(each.transpose(0, 1)[None] for each in (q, k, v)), None, way.scaling, segments,
            sliding_window=way.window, softcap=way.softcap, s_aux=way.sinks,
        )[0][0]  # fmt: skip
        exact = wanted(q, k, v, segments, every, way)
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
        upstream = torch.randn(exact.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        mine = torch.autograd.grad(found, taken, upstream)
        for one, other in zip(mine, torch.autograd.grad(exact, taken, upstream), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def _kernel(
    q: torch.Tensor, k: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, scale: float | None, window: list[int]
) -> torch.Tensor:
    """Scores ``[heads, queries, keys]`` as flash attention's kernel has them: -inf where nothing is seen."""
    repeated = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q, repeated) * (scale or q.shape[-1] ** -0.5)
    seen = torch.zeros(scores.shape[1:], dtype=torch.bool)
    for number in range(len(cu_q) - 1):
        (first, end), (begin, last) = cu_q[number : number + 2].tolist(), cu_k[number : number + 2].tolist()
        for query in range(first, end):
            place = last - (end - query)
            seen[query, max(begin, begin if window[0] < 0 else place - window[0]) : place + 1 + window[1]] = True
    return scores.masked_fill(~seen, -torch.inf)


def _forward(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, _q: int, _k: int, *more: Any) -> Any:
    _causal, scale, window, _gqa = more
    scores = _kernel(q, k, cu_q, cu_k, scale, window)
    log_sum = scores.logsumexp(-1)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", (scores - log_sum[..., None]).exp(), values), log_sum, torch.zeros(2)


def _backward(upstream: Any, q: Any, k: Any, v: Any, out: Any, log_sum: Any, cu_q: Any, cu_k: Any, *more: Any) -> Any:
    """As the kernel does it: by nothing but its output and the log of the sum (Dao 2023, algorithm 2)."""
    *_, scale, window = more
    shares = (_kernel(q, k, cu_q, cu_k, scale, window) - log_sum[..., None]).exp()
    group = q.shape[1] // k.shape[1]
    values, keys = (each.repeat_interleave(group, 1) for each in (v, k))
    along = (upstream * out).sum(-1).T[..., None]
    of_scores = shares * (torch.einsum("qhd,khd->hqk", upstream, values) - along) * (scale or q.shape[-1] ** -0.5)

    def together(of_heads: torch.Tensor) -> torch.Tensor:
        return of_heads.unflatten(1, (-1, group)).sum(2)

    of_keys = together(torch.einsum("hqk,qhd->khd", of_scores, q))
    return (
        torch.einsum("hqk,khd->qhd", of_scores, keys),
        of_keys,
        together(torch.einsum("hqk,qhd->khd", shares, upstream)),
    )


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rows", [[(3, [4, 2]), (1, [5])], [(7, []), (4, [])]])
def test_sinks_around_the_kernel_have_the_right_gradients(
    rows: list[tuple[int, list[int]]], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forward and backward pass, by their definition, in the kernel's place."""
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", _forward)
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn_backward", _backward)
    segments, every = segments_of(rows)
    q, k, v, sinks = tensors(segments)
    way = Way(0.4, window, None, sinks)
    keys, values = (k, v) if segments.keys is None else (k[segments.keys], v[segments.keys])
    found = attention._flash(q, keys, values, way, segments)
    exact = wanted(q, k, v, segments, every, way)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)
    upstream = torch.randn(exact.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = torch.autograd.grad(found, (q, k, v, sinks), upstream)
    for one, other in zip(mine, torch.autograd.grad(exact, (q, k, v, sinks), upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_kernel_is_called_as_torch_has_it() -> None:
    """Its operations check their arguments without a GPU, though they compute nothing."""
    with FakeTensorMode():
        q, k, v = (torch.empty(12, heads, 16, dtype=torch.bfloat16).requires_grad_() for heads in (4, 2, 2))
        sinks, places = torch.empty(4, dtype=torch.bfloat16).requires_grad_(), torch.empty(3, dtype=torch.int32)
        found = FlashWithSinks.apply(q, k, v, sinks, places, places, 7, 7, 0.25, (4, 0))
        assert found.shape == q.shape and found.dtype == torch.bfloat16
        found.sum().backward()
        for each in (q, k, v, sinks):
            assert each.grad is not None and each.grad.shape == each.shape and each.grad.dtype == each.dtype


@settings(deadline=None, max_examples=60)
@given(rows=ROWS)
def test_a_state_runs_through_each_sequence_alone(rows: list[tuple[int, list[int]]]) -> None:
    segments, every = segments_of(rows)
    row = torch.randn(1, int(segments.starts_q[-1]), 3, dtype=torch.float64)
    laid_out: list[int] = []

    def sums(sequences: torch.Tensor) -> torch.Tensor:
        laid_out.append(sequences.shape[:2].numel())
        return sequences.cumsum(1)

    found = segments.whole.mixed(sums, row)
    for number, places in enumerate(every):
        first, end = segments.starts_q[number : number + 2].tolist()
        torch.testing.assert_close(found[0, first:end], row[0, places].cumsum(0)[len(places) - (end - first) :])
    assert sum(laid_out) <= 2 * sum(map(len, every)), "padding is never more than what is padded"
