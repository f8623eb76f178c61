"""Moments in 8 bits take a quarter, and come back from a checkpoint bit by bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.services.learning.eight_bit import in_fp32, quantize
from penstock.services.learning.host_moments import MOMENTS
from penstock.services.trainer.learner import Learner
from tests.conftest import TINY
from tests.trainer.steps import a_step
from tests.trainer.test_checkpoint import a_learner, continues_exactly

pytest.importorskip("torchao", reason="penstock[adam8bit] is not installed: make test-low-bits")
from torchao.optim.subclass_8bit import OptimState8bit

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


def test_training_continues_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    continues_exactly(tmp_path, moments="8bit")


def test_moments_in_8_bits_are_a_quarter_and_nearly_the_same() -> None:
    def trained(moments: str) -> tuple[Learner, int]:
        torch.manual_seed(0)
        learner = a_learner(Qwen3ForCausalLM(Qwen3Config(**{**TINY, "hidden_size": 64})), moments=moments)
        for seed in range(4):
            learner.train(a_step(seed))
        states = [learner.optimizer.state[p] for p in learner.parameters.values() if p.numel() >= 4096]
        kept = [state[key] for state in states for key in MOMENTS]
        parts = [getattr(tensor, "codes", tensor) for tensor in kept]
        return learner, sum(part.numel() * part.element_size() for part in parts)

    (exact, whole), (near, small) = trained("float32"), trained("8bit")
    assert small * 4 == whole > 0
    torch.manual_seed(0)
    start = Qwen3ForCausalLM(Qwen3Config(**{**TINY, "hidden_size": 64})).state_dict()
    moved, apart = 0.0, 0.0
    for name, parameter in exact.parameters.items():
        moved += float((parameter - start[name]).square().sum())
        apart += float((parameter - near.parameters[name]).square().sum())
    assert 0 < apart < 0.05 * moved
