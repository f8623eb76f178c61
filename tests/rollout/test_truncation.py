"""What top_p, top_k and min_p leave of a distribution, however little of it is ranked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from penstock.services.rollout.engines.torch import sampling


def ranked_whole(p: np.ndarray, top_p: float, top_k: int, min_p: float) -> np.ndarray:
    """One row, by the rule's own words."""
    order = np.argsort(-p, kind="stable")
    left = np.where(p[order] >= np.float32(min_p) * p.max(), p[order], 0)
    if top_k:
        left[top_k:] = 0
    if top_p < 1:
        before = np.concatenate([[0], left.cumsum()[:-1]])
        left[before >= np.float32(top_p) * left.sum()] = 0
    found = np.zeros_like(p)
    found[order] = left
    return found


ROW = some.tuples(some.sampled_from([1.0, 0.3, 0.9]), some.sampled_from([0, 1, 7, 40]), some.sampled_from([0.0, 0.02]))


@given(some.lists(ROW, min_size=1, max_size=5), some.sampled_from([30, 300]), some.integers(0, 10))
def test_it_is_what_sorting_everything_leaves(rows: list[tuple[float, int, float]], size: int, seed: int) -> None:
    drawn = torch.randn(len(rows), size, generator=torch.Generator().manual_seed(seed)).mul(3)
    p = drawn.bfloat16().float().softmax(-1)  # of which many are equal
    top_p, top_k, min_p = (torch.tensor(list(each)) for each in zip(*rows, strict=True))
    truncates = bool((top_p < 1).any()), bool((top_k > 0).any()), bool((min_p > 0).any())
    if not any(truncates):
        return
    likeliest = None if bool(((top_p < 1) & (top_k == 0)).any()) else int(top_k.max()) or None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "FIRST", 20)  # of a vocabulary of 300 these are looked at first
        kept = [each if wanted else None for each, wanted in zip((top_p, top_k, min_p), truncates, strict=True)]
        found = sampling._truncate(p, *kept, likeliest)
    wanted = np.stack([ranked_whole(row, *how) for row, how in zip(p.numpy(), rows, strict=True)])
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6)


def test_what_a_row_keeps_follows_from_it_alone() -> None:
    p = torch.randn(40, 8192, generator=torch.Generator().manual_seed(0)).bfloat16().float().softmax(-1)
    alone = sampling._truncate(p, None, torch.full((40,), 5), None, 5)
    both = torch.cat([torch.full((40,), 5), torch.tensor([200])])
    beside = sampling._truncate(torch.cat([p, p[:1]]), None, both, None, 200)
    assert torch.equal(beside[:40], alone)
    among_all = sampling._truncate(
        torch.cat([p, p[:1]]), torch.tensor([1.0] * 40 + [0.9]), torch.cat([both[:40], torch.tensor([0])]), None, None
    )
    assert torch.equal(among_all[:40], alone)
