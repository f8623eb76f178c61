"""Muon is torch's, in fp32; it has what is a hidden matrix, and AdamW all else; and a checkpoint goes on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForTokenClassification

from penstock.services.learning import checkpoint
from penstock.services.learning.config import OptimizerConfig
from penstock.services.learning.muon import MOMENTUM, hidden_matrices, orthogonalize
from penstock.services.learning.optimizer import MOMENTS, make_optimizer, set_rate
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from tests.conftest import TINY
from tests.trainer.rank_program import a_mixture, a_model
from tests.trainer.steps import a_step
from tests.trainer.test_checkpoint import CPU, a_learner, continues_exactly

WORLD = World(CPU)


@pytest.mark.parametrize("nesterov", [True, False])
def test_twenty_steps_are_torchs(nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch iterates in bf16 alone: here its own code is made to do so in fp32."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    config = OptimizerConfig(type="muon", lr=3e-3, weight_decay=0.1, nesterov=nesterov, momentum=0.9)
    ours, theirs = a_model(), a_model()
    named = dict(theirs.named_parameters())
    hidden = [name for name, p in named.items() if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    about = {"lr": 3e-3, "weight_decay": 0.1}
    muon = torch.optim.Muon(
        [named[name] for name in hidden], **about, momentum=0.9, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
    )
    rest = [p for name, p in named.items() if name not in hidden]
    vectors = {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}
    adamw = torch.optim.AdamW([{"params": [p for p in rest if p.ndim > 1]}, vectors], **about, betas=(0.9, 0.95))
    optimizer = make_optimizer(ours, dict(ours.named_parameters()), config, WORLD)
    random = torch.Generator().manual_seed(1)
    for step in range(20):
        rate = 3e-3 / (1 + step)
        for each in (muon, adamw, optimizer):
            set_rate(each, rate)
        for (_, one), other in zip(ours.named_parameters(), named.values(), strict=True):
            one.grad = torch.randn(one.shape, generator=random)
            other.grad = one.grad.clone()
        for each in (muon, adamw, optimizer):
            each.step()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=1e-6, atol=1e-6, msg=name)


@settings(deadline=None, max_examples=30)
@given(m=st.integers(1, 40), n=st.integers(1, 40), size=st.floats(-4, 4), seed=st.integers(0, 99))
def test_singular_values_become_alike_and_vectors_stay(m: int, n: int, size: float, seed: int) -> None:
    given = torch.randn(m, n, generator=torch.Generator().manual_seed(seed)) * 10**size
    left, values, right = torch.linalg.svd(given, full_matrices=False)
    found = left.mT @ orthogonalize(given[None], 5)[0] @ right.mT
    whole = values > values[0] / 30  # what is nearly not there is not made much of
    reached = found.diagonal()[whole]
    assert reached.min() > 0.5 and reached.max() < 1.25
    assert (found - found.diagonal().diag()).abs().max() < 1e-3
