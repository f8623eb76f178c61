"""Rows that share a prompt hold every sampled token once, and give the log-probabilities of separate rows."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from penstock.protocols.experience import Trajectory
from penstock.services.learning.model_learner import ModelLearner
from penstock.services.modeling import logprobs as module
from penstock.services.modeling import packing
from penstock.services.modeling.families import OUR_ATTENTION
from penstock.services.modeling.filling import fill
from penstock.services.modeling.logprobs import logprobs
from penstock.services.modeling.packing import Layout, plan_passes, plan_rows
from tests.conftest import TINY, make_group
from tests.trainer.steps import a_step


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    model.set_attn_implementation(OUR_ATTENTION)
    return model


@pytest.mark.parametrize("masked", [1024, 0])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31), groups=st.integers(1, 6), n=st.integers(1, 5), budget=st.integers(1, 200))
def test_every_trajectory_is_planned_once_with_its_own_logprobs(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, masked: int, seed: int, groups: int, n: int, budget: int
) -> None:
    """With a mask, and, as everywhere on a GPU, packed."""
    monkeypatch.setattr(packing, "MASKED_ROW_TOKENS", masked)
    random = np.random.default_rng(seed)
    made = [make_group(random, number, n) for number in range(groups)]
    trajectories = [t for group in made for t in group.trajectories]
    numbers = [group.number for group in made for _ in group.trajectories]
    found = {}
    for rows in plan_rows(trajectories, numbers, budget, torch.device("cpu")):
        assert rows.tokens.numel() <= max(budget, rows.tokens.shape[1])
        assert isinstance(rows.attention, torch.Tensor) == (masked > 0)
        if not masked and len(rows.index) > 1:
            assert rows.tokens.numel() <= budget, "what is packed holds no padding"
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


def test_gradients_through_packed_rows_are_those_of_separate_ones(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(3)
    made = [make_group(random, number, 3) for number in range(3)]
    trajectories = [t for group in made for t in group.trajectories]
    numbers = [group.number for group in made for _ in group.trajectories]

    def gradients(layout: Layout, masked: int) -> list[torch.Tensor]:
        monkeypatch.setattr(packing, "MASKED_ROW_TOKENS", masked)
        model.zero_grad()
        for rows in plan_rows(trajectories, numbers, 64, torch.device("cpu"), layout):
            logprobs(model, rows, 1.0).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for one, other in zip(gradients("either", 0), gradients("apart", 1024), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_what_layers_with_a_state_read_stays_within_the_budget() -> None:
    """They read each answer with its prompt, though the row has that once."""
    random = np.random.default_rng(0)
    made = [make_group(random, number, 6) for number in range(3)]
    trajectories = [t for group in made for t in group.trajectories]
    numbers = [group.number for group in made for _ in group.trajectories]
    found, shared = [], 0
    for each in plan_passes(trajectories, numbers, 60, torch.device("cpu"), "whole"):
        read = sum(len(trajectories[index].tokens) for index in each.index)
        assert read <= 60 or len(each.index) == 1
        shared += read > each.real
        found += each.index
    assert sorted(found) == list(range(len(trajectories))) and shared


FAMILIES: dict[str, dict[str, int]] = {
    "gemma2": {}, "cohere": {}, "granite": {}, "gpt2": {}, "mamba": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64},
    "mixtral": {"num_local_experts": 4},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family_are_made_in_chunks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its soft cap or its scale, which a head alone would leave out; whatever it hands on of the base model's."""
    config = AutoConfig.for_model(family, **TINY, **FAMILIES[family])
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    made = [make_group(np.random.default_rng(0), number, 3) for number in range(2)]
    trajectories = [t for group in made for t in group.trajectories]
    widest = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda _module, _inputs, output: widest.append(output.numel()))
    monkeypatch.setattr(module, "LOGIT_BYTES", 4 * TINY["vocab_size"] * 3)
    (rows,) = plan_rows(trajectories, [0] * 6, 4096, torch.device("cpu"), "apart")
    found = logprobs(model, rows, 1.0)
    assert max(widest) <= 3 * TINY["vocab_size"], "three tokens' logits at once"
    found.sum().backward()
    assert head.weight.grad is not None
    for k, index in enumerate(rows.index):
        ids = torch.from_numpy(trajectories[index].tokens.astype(np.int64))
        wanted = model(ids[None]).logits[0].float().log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)
        mask = rows.mask[k]
        torch.testing.assert_close(found[k][mask], wanted[mask[: len(wanted)]], rtol=1e-4, atol=1e-5)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 60), max_size=40), room=st.integers(10, 100), ranks=st.integers(1, 5))
def test_what_goes_together_fits_and_is_all_of_it(sizes: list[int], room: int, ranks: int) -> None:
    found = fill(sizes, room, ranks)
    assert sorted(number for together in found for number in together) == list(range(len(sizes)))
    loads = [sum(sizes[number] for number in together) for together in found]
    assert all(load <= room or len(together) == 1 for load, together in zip(loads, found, strict=True))
    few = fill(sizes, room)
    assert len(few) <= len(found) < len(few) + ranks
    halves = sum(2 * sum(sizes[number] for number in together) > room for together in few)
    assert halves >= len(few) - 1, "two that are half empty would be one"


@pytest.mark.parametrize(("mean", "ranks"), [(250, 4), (700, 4), (1500, 4), (1500, 8)])
def test_ranks_that_wait_for_each_other_compute_passes_of_about_one_size(mean: int, ranks: int) -> None:
    """Groups of answers whose lengths have a long tail; before, 0.71 to 0.77 of the ranks' time was work."""
    random, lengths = np.random.default_rng(0), list[int]()
    for _ in range(64):
        of_group = random.normal(0, 0.4)
        lengths += [int(np.clip(mean * np.exp(of_group + random.normal(0, 0.4)), 8, 3072)) for _ in range(8)]
    trajectories, numbers = long_tailed(lengths), [number // 8 for number in range(len(lengths))]
    passes = [*plan_passes(trajectories, numbers, 8192, torch.device("cpu"), "packed", False, ranks)]
    shares = []
    for rank in range(ranks):
        world, flops = SimpleNamespace(data_size=ranks, data_rank=rank), SimpleNamespace(deal=lambda every: None)
        mine = ModelLearner._dealt(SimpleNamespace(world=world, flops=flops), passes)  # type: ignore[arg-type]
        shares.append([(each.real, counts) for each, counts in mine])
    assert sum(counts for share in shares for _, counts in share) == len(passes)
    rounds = sum(max(share[k][0] for share in shares) for k in range(len(shares[0])))
    assert sum(each.real for each in passes) > 0.9 * ranks * rounds
    assert sum(each.real for each in passes) > 0.8 * 8192 * len(passes)


def long_tailed(lengths: list[int]) -> list[Trajectory]:
    """Answers of these ``lengths``, eight each to a prompt of 20 tokens."""
    made = []
    for index, length in enumerate(lengths):
        tokens = np.full(20 + length, index // 8, np.int32)
        mask = np.concatenate([np.zeros(20, np.uint8), np.ones(length, np.uint8)])
        versions = mask.astype(np.int32) - 1
        made.append(Trajectory(tokens, mask, np.zeros(len(mask), np.float32), versions, text="", finish="stop"))
    return made


def test_a_rank_lays_out_its_own_passes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And knows of the others how much they compute."""
    step, laid_out, own = a_step(0), [], packing._pack
    monkeypatch.setattr(packing, "_pack", lambda *given: laid_out.append(given) or own(*given))
    passes = list(plan_passes(step.trajectories, step.groups, 30, torch.device("cpu"), "packed"))
    assert len(passes) > 2 and not laid_out
    for each in passes:
        rows = each.rows()
        assert each.index == rows.index and each.predicted == len(rows.target) and each.real == rows.tokens.numel()
        queries, keys = (np.diff(starts) for starts in (rows.attention.starts_q, rows.attention.starts_k))
        assert each.pairs == int((queries * (keys - queries) + queries * (queries + 1) // 2).sum())
    assert len(laid_out) == len(passes)
