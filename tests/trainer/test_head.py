"""The head in fp32 beside a model in 16 bits: its logits, its gradients, and what of the model it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.protocols.digests import Gmac
from penstock.services.modeling import logprobs as module
from penstock.services.modeling.head import compute_head_in, linear
from penstock.services.modeling.load import ModelError
from penstock.services.modeling.packing import plan_rows
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.teacher import Teacher
from penstock.services.runtime.errors import SetupError
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from penstock.services.trainer.rank_setup import load_policy
from penstock.services.weights.sender.shard_exporter import ShardExporter
from tests.conftest import TINY, make_group
from tests.trainer.rank_program import a_model
from tests.trainer.steps import a_step

CPU = torch.device("cpu")
SIXTEEN = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""And how far rounding moves a number, as a share of it."""


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(list(SIXTEEN)), st.sampled_from([(), (5,), (2, 3), (0,)]), st.integers(1, 40), st.integers(1, 60),
    st.booleans(), st.integers(0, 1000),
)  # fmt: skip
def test_products_are_those_of_fp32_and_each_gradient_has_its_own_dtype(
    dtype: torch.dtype, shape: tuple[int, ...], size: int, outputs: int, bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    given = [some(*shape, size), some(outputs, size), *([some(outputs)] if bias else [])]
    found, wide = linear(*given), [each.detach().double().requires_grad_() for each in given]
    assert found.dtype == torch.float32
    assert torch.equal(found, F.linear(*[each.float() for each in given]).view_as(found))
    exact = F.linear(*wide)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(found.shape, generator=generator)
    mine = torch.autograd.grad(found, given, upstream)
    for one, wanted in zip(mine, torch.autograd.grad(exact, wide, upstream.double()), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), wanted, rtol=2 * SIXTEEN[dtype], atol=1e-4)


def test_of_a_float32_model_nothing_changes() -> None:
    model, step = a_model(), a_step(0)
    (rows,) = plan_rows(step.trajectories, step.groups, 100_000, CPU)
    before = module.logprobs(model, rows, 1.0)
    compute_head_in(model, "float32")
    assert torch.equal(module.logprobs(model, rows, 1.0), before)


def exact(family: str, model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """float64 logits of ``hidden``, with what the family does to them."""
    logits = hidden.double() @ model.get_output_embeddings().weight.detach().double().T
    if family == "gemma2":
        cap = model.config.final_logit_softcapping
        return (logits / cap).tanh() * cap
    return logits * model.config.logit_scale if family == "cohere" else logits


@pytest.mark.parametrize(
    ("family", "tied"), [("qwen3", True), ("llama", False), ("gemma2", True), ("cohere", True), ("mistral", False)]
)
def test_log_probabilities_are_those_of_the_hidden_states_in_chunks_too(
    family: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **TINY, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
    for parameter in model.parameters():  # logits of some size
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    stored = {name: (p, p.detach().clone()) for name, p in model.state_dict(keep_vars=True).items()}
    made = [make_group(np.random.default_rng(0), number, 3) for number in range(2)]
    trajectories = [t for group in made for t in group.trajectories]
    (rows,) = plan_rows(trajectories, [0] * 6, 4096, CPU, "apart")
    base, inputs = getattr(model, model.base_model_prefix), module.model_inputs(model, rows)
    hidden = base(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[rows.source]
    logs = exact(family, model, hidden.detach()).log_softmax(-1).gather(-1, rows.target[:, None])[:, 0]
    wanted = rows.scatter(logs.float())

    def off() -> float:
        return float((module.logprobs(model, rows, 1.0) - wanted).abs().max().detach())

    rounded = off()
    compute_head_in(model, "float32")
    assert off() < 1e-5 < 1e-4 < rounded
    monkeypatch.setattr(module, "LOGIT_BYTES", 4 * TINY["vocab_size"] * 3)
    assert off() < 1e-5
    module.logprobs(model, rows, 1.0).sum().backward()
    now = model.state_dict(keep_vars=True)
    for name, (parameter, before) in stored.items():
        assert now[name] is parameter and torch.equal(parameter, before), name
    weight = model.get_output_embeddings().weight
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert (weight is model.get_input_embeddings().weight) == tied


def test_a_policy_in_bf16_publishes_what_it_would_and_trains_as_in_fp32(tmp_path: Path) -> None:
    a_model().save_pretrained(tmp_path)
    world, config = World(CPU), TrainerConfig.model_validate({"optimizer": {"lr": 1e-3}})

    def learner(dtype: str, head: str | None) -> Learner:
        model = load_trainable(str(tmp_path), world, CPU, dtype)
        compute_head_in(model, head)
        return Learner(model, config, 1.0, world)

    plain, wide, exact = learner("bfloat16", None), learner("bfloat16", "float32"), learner("float32", None)
    digests = {
        ShardExporter(each.published, "bfloat16", 4096, world, Gmac.of_run("test")).digest() for each in (plain, wide)
    }
    assert len(digests) == 1
    found = wide.train(a_step(0))
    assert found["grad_norm"] == pytest.approx(exact.train(a_step(0))["grad_norm"], rel=0.05)
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in wide.parameters.values())


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_an_adapter_of_the_head_is_computed_as_it_is(variant: str, tmp_path: Path) -> None:
    a_model(tie_word_embeddings=False).save_pretrained(tmp_path)
    world, start = World(CPU), str(tmp_path)
    lora = {"rank": 4, "targets": ["lm_head"], "variant": variant}
    config = TrainerConfig.model_validate({"optimizer": {"lr": 1e-1}, "lora": lora})
    model = load_policy(start, start, world, "bfloat16", config)
    compute_head_in(model, "float32")
    made: list[torch.dtype] = []
    for layer in model.get_output_embeddings().modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(lambda _module, _inputs, output: made.append(output.dtype))
    learner = Learner(model, config, 1.0, world)
    for number in range(2):  # the second finds an adapter that adds something
        assert learner.train(a_step(number))["grad_norm"] > 0
    assert set(made) == {torch.float32} and len(made) >= 3 * 2, "the matrix, and both of the adapter"


def test_a_teacher_has_the_head_that_its_options_say(tmp_path: Path) -> None:
    a_model().save_pretrained(tmp_path)
    group = make_group(np.random.default_rng(0), 0, 3)
    found = [
        Teacher(str(tmp_path), device="cpu", head_dtype=head).score_group(group, {})["teacher"]
        for head in ("float32", None)
    ]
    assert 0 < np.abs(found[0] - found[1]).max() < 0.05
    with pytest.raises(SetupError, match=r"options.head_dtype: 'float64'; set it to float32 or null"):
        Teacher(str(tmp_path), device="cpu", head_dtype="float64")  # type: ignore[arg-type]


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(ModelError, match=r"model.head_dtype: the head of qwen3 is no linear layer"):
        compute_head_in(a_model().model, "float32")
