"""Moments in 8 bits come back from a checkpoint bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.optim.subclass_8bit import OptimState8bit

from penstock.services.learning.eight_bit import in_fp32, quantize

BLOCK = 256


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), signed=st.booleans(), log_size=st.floats(-20, 4), tail=st.floats(0, 6))
def test_what_was_saved_is_what_is_restored(seed: int, signed: bool, log_size: float, tail: float) -> None:
    random = np.random.default_rng(seed)
    values = random.normal(size=8 * BLOCK) * random.random(8 * BLOCK) ** tail * 10**log_size
    values[:BLOCK] = 0.0
    values[2 * BLOCK : 3 * BLOCK] = -np.abs(values[2 * BLOCK : 3 * BLOCK])
    live = OptimState8bit.zeros((8 * BLOCK,), signed)
    live.copy_(torch.tensor(values if signed else values**2, dtype=torch.float32))
    restored = OptimState8bit.zeros((8 * BLOCK,), signed)
    quantize(in_fp32(live), restored)
    assert torch.equal(in_fp32(restored), in_fp32(live))


@pytest.mark.parametrize("signed", [False, True])
def test_what_was_never_in_8_bits_is_as_near_as_torchao_brings_it(signed: bool) -> None:
    values = torch.randn(8 * BLOCK, generator=torch.Generator().manual_seed(0))
    values = values if signed else values.square()
    ours, theirs = (OptimState8bit.zeros((8 * BLOCK,), signed) for _ in range(2))
    quantize(values, ours)
    theirs.copy_(values)
    error = {one: (in_fp32(one) - values).abs().max() for one in (ours, theirs)}
    assert error[ours] <= error[theirs] * 1.01
