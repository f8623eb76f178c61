"""An adapter of a model whose matrices lie in 4 bits: what they are there, and that everybody goes by what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from penstock.pipeline.bench.memory import compare
from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.preflight.lora import _fits
from penstock.pipeline.resources.model_files import read_config
from penstock.pipeline.tools.merge import merge
from penstock.services.learning import checkpoint
from penstock.services.learning.config import CheckpointConfig
from penstock.services.modeling.adapter_files import FILE, read_shape
from penstock.services.modeling.load import load_model
from penstock.services.modeling.lora import Adapter, Merged, adapted_layers
from penstock.services.runtime.errors import SetupError
from penstock.services.trainer.config import LoraConfig
from penstock.services.trainer.learner import Learner
from tests.critic.test_learner import valued
from tests.critic.test_lora import critic_of
from tests.trainer.rank_program import a_model
from tests.trainer.steps import Tokenizer, a_step
from tests.trainer.test_lora import CPU, learner, logits, published
from tests.trainer.test_shapes import check_shapes

pytest.importorskip("bitsandbytes", reason="penstock[qlora] is not installed: make test-low-bits")
from penstock.services.modeling.four_bit import BLOCK, SCALES, FourBitLinear, in_four_bits_by, rounded

NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
"""Dettmers et al. 2023, appendix E."""

start = pytest.fixture(lambda tmp_path: _saved(tmp_path / "start"))


def _saved(folder: Path) -> Path:
    a_model().save_pretrained(folder)
    return folder


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 70), inputs=st.integers(1, 70), log_size=st.floats(-4, 4)
)  # fmt: skip
def test_each_number_is_the_nearest_code_of_its_block(seed: int, rows: int, inputs: int, log_size: float) -> None:
    matrix = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)) * 10**log_size
    blocks = functional.pad(matrix.flatten(), (0, -matrix.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True)
    wanted = NF4[(blocks[..., None] / largest[..., None] - NF4).abs().argmin(-1)] * largest
    found = functional.pad(rounded(matrix).flatten(), (0, -matrix.numel() % BLOCK)).view(-1, BLOCK)
    # Scales are rounded as well, to 8 bits of the largest of their own block.
    off = (largest - largest.mean()).abs()
    off = functional.pad(off.flatten(), (0, -len(off) % SCALES)).view(-1, SCALES).amax(1)
    off = off.repeat_interleave(SCALES)[: len(largest), None] / 32 + 1e-6 * largest
    assert bool(((found - wanted).abs() <= off).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_published_is_what_is_trained(start: Path, dtype: str) -> None:
    one = learner(start, dtype=dtype, quantize="nf4")
    plain = load_model(str(start), dtype, CPU).float()
    adapted = {name for name, weight in one.published.items() if isinstance(weight, Merged)}
    assert len(adapted) == 14
    for name in adapted:
        plain.get_parameter(name).data = rounded(plain.get_parameter(name).detach().to(getattr(torch, dtype))).float()
    for name, weight in published(one).items():
        torch.testing.assert_close(weight, plain.get_parameter(name).detach(), rtol=1e-6, atol=1e-7)
    held = sum(buffer.nbytes for module in _layers(one) for buffer in module.buffers() if buffer.numel() != 256)
    assert held < 0.53 * sum(module.shape.numel() for module in _layers(one))
    for seed in range(3):
        one.train(a_step(seed))
    plain.load_state_dict(published(one), strict=False)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.0, "atol": 2e-2}
    torch.testing.assert_close(logits(plain), logits(one.model).float(), **close)


def _layers(of: Learner) -> list[FourBitLinear]:
    return [module for module in of.model.modules() if isinstance(module, FourBitLinear)]


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_gradients_are_those_beside_the_matrices_as_they_are(start: Path, tmp_path: Path, checkpointing: Any) -> None:
    one = learner(start, quantize="nf4")
    plain = a_model()
    plain.load_state_dict(published(one))
    plain.save_pretrained(tmp_path / "rounded")
    other = learner(tmp_path / "rounded")
    if checkpointing:
        how = {"context_fn": _keeping()} if checkpointing == "selective" else {}
        one.model.gradient_checkpointing_enable({"use_reentrant": False, **how})
    for each in (one, other):
        torch.manual_seed(1)
        for name, parameter in each.parameters.items():
            if ".lora_B." in name:
                parameter.data.normal_(std=0.05)
        each.accumulate(a_step(1))
    assert one.parameters.keys() == other.parameters.keys()
    for name, parameter in one.parameters.items():
        wanted = other.parameters[name].grad
        assert parameter.grad is not None and wanted is not None and float(wanted.norm()) > 0, name
        assert float((parameter.grad - wanted).norm() / wanted.norm()) < 1e-5, name


def _keeping() -> Any:
    from penstock.services.modeling.checkpointing import keep_products

    return keep_products


def test_a_checkpoint_goes_on_and_is_merged_as_it_was_trained(start: Path, tmp_path: Path) -> None:
    one = learner(start, quantize="nf4")
    one.train(a_step(0))
    saver = checkpoint.Saver(one, Tokenizer(), tmp_path / "checkpoints", CheckpointConfig(keep=1))
    path = saver.begin().result()
    saver.close()
    again = learner(start, path, quantize="nf4")
    checkpoint.restore(again, path)
    wanted = published(one)
    for name, weight in published(again).items():
        assert torch.equal(weight, wanted[name]), name
    (path / "tokenizer.json").unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: Tokenizer())
        merge(path, tmp_path / "merged")
    merged = Qwen3ForCausalLM.from_pretrained(tmp_path / "merged")
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter.detach(), wanted[name], rtol=1e-6, atol=1e-7)


def test_a_reference_is_what_the_policy_began_as(start: Path, tmp_path: Path) -> None:
    reference = load_model(str(start), "float32", CPU)
    in_four_bits_by(reference, adapted_layers(Adapter(4, 8, (), four_bits=True), str(start)), CPU)
    torch.testing.assert_close(logits(reference), logits(learner(start, quantize="nf4").model))
    begun = tmp_path / "begun"
    begun.mkdir()
    learner(start, targets=["q_proj"]).adapted.write_config(begun)  # type: ignore[union-attr]
    as_begun = LoraConfig(rank=4, alpha=8, start=str(begun), quantize="nf4")
    assert len(adapted_layers(Adapter.of(as_begun), str(start))) == 2, "those of the adapter that it begins as"
    some = load_model(str(start), "float32", CPU)
    in_four_bits_by(some, adapted_layers(Adapter(4, 8, ("q_proj",), four_bits=True), str(start)), CPU)
    assert sum(isinstance(module, FourBitLinear) for module in some.modules()) == 2, "of each layer, what is adapted"


def test_ranks_in_a_shape_are_one_process(tmp_path: Path) -> None:
    a_model().save_pretrained(tmp_path / "start")
    lora = {"ranks": 2, "lora": {"rank": 3, "quantize": "nf4"}}
    shapes = {
        "sequence parallel": lora | {"sequence_parallel": 2, "gradient_checkpointing": "selective"},
        "pipeline on the host": lora | {"pipeline_parallel": 2, "offload": True, "gradient_checkpointing": True},
    }
    check_shapes(shapes, tmp_path)


def test_what_cannot_be_is_said(start: Path) -> None:
    with pytest.raises(ValidationError, match=r"quantize: rollouts would merge .*; set publish to merged"):
        LoraConfig(quantize="nf4", publish="adapter")
    with pytest.raises(ValidationError, match=r"quantize: DoRA .*; set variant to lora or rslora"):
        LoraConfig(quantize="nf4", variant="dora")
    lora = ["trainer.lora={quantize: nf4}", "model.dtype=float16"]
    with pytest.raises(ConfigError, match=r"trainer.lora.quantize: .* set model.dtype to bfloat16 or float32"):
        load(Path("configs/grpo-0.5b.yaml"), lora)
    one = learner(start, quantize="nf4")
    one.adapted.write_config(start)  # type: ignore[union-attr]
    (start / FILE).touch()
    for other, message in (
        ({}, r"trainer.lora.quantize: the adapter .* set it to nf4"),
        ({"quantize": "nf4"}, r"model.dtype=bfloat16: .* were made of float32"),
    ):
        with pytest.raises(SetupError, match=message):
            _fits(start, LoraConfig.model_validate({"rank": 4, "alpha": 8} | other), "bfloat16")
    _fits(start, LoraConfig(rank=4, alpha=8, quantize="nf4"), "float32")
    with pytest.raises(ValidationError, match=r"quantize: the head stays whole; take lm_head out of the targets"):
        LoraConfig(quantize="nf4", targets=("lm_head", "q_proj"))


def test_the_plan_counts_what_the_code_allocates(tmp_path: Path) -> None:
    path = Path("configs/grpo-8b.yaml")
    about = read_config(load(path))
    assert about
    (tmp_path / "config.json").write_text(json.dumps(about | {"num_hidden_layers": 2}))
    given = [f"model.path={tmp_path}", "trainer.ranks=2", "trainer.lora.rank=64", "trainer.lora.quantize=nf4"]
    for found in compare(path, given):
        assert found.plan == pytest.approx(found.peak, rel=0.1), found.process


def test_a_critic_learns_beside_matrices_in_4_bits_and_goes_on_so(start: Path, tmp_path: Path) -> None:
    critic = critic_of(start, quantize="nf4")
    assert sum(isinstance(module, FourBitLinear) for module in critic.model.modules()) == 14
    losses = [critic.train(valued(critic, a_step(0)))["critic_loss"] for _ in range(20)]
    assert losses[-1] < 0.6 * losses[0]
    saver = checkpoint.Saver(critic, Tokenizer(), tmp_path / "checkpoints", CheckpointConfig(keep=1))
    path = saver.begin().result()
    saver.close()
    assert read_shape(path, "").quantize == "nf4"
    again = critic_of(start, path, quantize="nf4")
    checkpoint.restore(again, path)
    for each in (critic, again):
        each.train(valued(each, a_step(4)))
    assert all(torch.equal(again.parameters[name], value) for name, value in critic.parameters.items())
