"""Rows that share a prompt hold every sampled token once, and give the log-probabilities of separate rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.services.modeling.logprobs import logprobs
from penstock.services.modeling.packing import plan_rows
from tests.conftest import TINY, make_group


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY)).eval()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), groups=st.integers(1, 6), n=st.integers(1, 5), budget=st.integers(1, 200))
def test_every_trajectory_is_planned_once_with_its_own_logprobs(
    model: LlamaForCausalLM, seed: int, groups: int, n: int, budget: int
) -> None:
    random = np.random.default_rng(seed)
    made = [make_group(random, number, n) for number in range(groups)]
    trajectories = [t for group in made for t in group.trajectories]
    numbers = [group.number for group in made for _ in group.trajectories]
    found = {}
    for rows in plan_rows(trajectories, numbers, budget, torch.device("cpu")):
        assert rows.tokens.numel() <= max(budget, rows.tokens.shape[1])
        with torch.no_grad():
            values = logprobs(model, rows, 1.0)
        tokens = rows.column([t.tokens for t in trajectories])
        assert torch.equal(rows.target, tokens[rows.mask].long())
        for k, index in enumerate(rows.index):
            assert index not in found
            found[index] = values[k][rows.mask[k]].numpy()
    assert sorted(found) == list(range(len(trajectories)))
    for index, trajectory in enumerate(trajectories):
        ids = torch.from_numpy(trajectory.tokens.astype(np.int64))
        with torch.no_grad():
            logs = model(ids[None]).logits[0].log_softmax(-1)
        wanted = logs[:-1].gather(-1, ids[1:, None]).squeeze(-1)[trajectory.loss_mask[1:] == 1].numpy()
        np.testing.assert_allclose(found[index], wanted, atol=2e-5)
