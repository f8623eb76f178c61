"""Mixtures of experts: what files and engines call their matrices, and what refuses to deal them out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from penstock.pipeline.models.tiny import make_tokenizer
from penstock.pipeline.tools.merge import merge
from penstock.services.learning import checkpoint
from penstock.services.learning.config import CheckpointConfig
from penstock.services.modeling.buffers import persistent_buffers
from penstock.services.modeling.experts import EXPERTS, as_in_files, counted, is_experts
from penstock.services.modeling.families import BALANCED
from penstock.services.modeling.load import attention_of, load_model, with_head
from penstock.services.modeling.parallel.expert import deal_experts
from penstock.services.modeling.parallel.world import Shape, World
from penstock.services.modeling.state_mixers import take_packed_rows
from penstock.services.modeling.weight_files import WeightFiles, save_in_parts
from penstock.services.runtime.errors import SetupError
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests import families
from tests.conftest import TINY
from tests.trainer.rank_program import CPU, a_mixture, a_model
from tests.trainer.steps import Tokenizer, a_step


def test_the_matrices_are_those_of_transformers_files(tmp_path: Path) -> None:
    model = a_mixture()
    model.save_pretrained(tmp_path)
    wanted = load_file(tmp_path / "model.safetensors")
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = dict(as_in_files("qwen3_moe", parameters))
    assert dict(as_in_files("mixtral", parameters)) == parameters, "a family whose files have other names"
    assert found.keys() == wanted.keys() and len(found) > len(parameters)
    for name, matrix in wanted.items():
        assert torch.equal(found[name], matrix), name
    stacked = [name for name, weight in parameters.items() if is_experts(name, weight)]
    assert counted(wanted) == dict.fromkeys(stacked, 8) and {name.rpartition(".")[2] for name in stacked} == {*EXPERTS}
    with WeightFiles(tmp_path) as files:
        for name in stacked:
            whole = parameters[name]
            assert name in files and files.shape(name) == tuple(whole.shape)
            assert torch.equal(files.block(name, (slice(2, 5), slice(None), slice(1, 9))), whole[2:5, :, 1:9])
            assert torch.equal(files.block(name, (slice(None),)), whole)


def test_a_checkpoint_has_the_files_of_transformers_and_goes_on(tmp_path: Path) -> None:
    config = TrainerConfig.model_validate({"optimizer": {"lr": 1e-3}})
    learner = Learner(a_mixture(), config, 1.0)
    learner.train(a_step(0))
    learner.version = 1
    saver = checkpoint.Saver(learner, Tokenizer(), tmp_path, CheckpointConfig(keep=1))
    path = saver.begin().result()
    saver.close()
    assert "model.layers.1.mlp.experts.7.up_proj.weight" in load_file(path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(path)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, learner.parameters[name]), name


def test_experts_that_files_have_turned_are_read_either_way_and_written_as_the_hub_has_them(tmp_path: Path) -> None:
    model = families.write("qwen3_vl_moe", tmp_path / "hub")
    model.save_pretrained(tmp_path / "transformers")
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    block = (slice(1, 3), slice(2, 40), slice(5, 9))
    for folder in (tmp_path / "hub", tmp_path / "transformers"):
        with WeightFiles(folder, model) as files:
            assert files.shape(name) == wanted[name].shape == (4, 48, 32)
            assert torch.equal(files.block(name, block), wanted[name][block])
    (tmp_path / "sent").mkdir()
    save_in_parts(tmp_path / "sent", as_in_files("qwen3_vl_moe", model.state_dict()))
    merge(tmp_path / "transformers", tmp_path / "merged")
    saver = checkpoint.Saver(Learner(model, TrainerConfig(), 1.0), Tokenizer(), tmp_path, CheckpointConfig(keep=1))
    path = saver.begin().result()
    saver.close()
    hub = load_file(tmp_path / "hub" / "model.safetensors")
    assert hub[name].shape == (4, 32, 48)
    for folder in (path, tmp_path / "sent", tmp_path / "merged"):
        written = load_file(folder / "model.safetensors")
        assert hub.keys() == written.keys()
        assert all(torch.equal(written[name], value) for name, value in hub.items()), folder


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2"])
def test_the_biases_that_choose_experts_are_rounded_nowhere(tmp_path: Path, family: str) -> None:
    """transformers keeps those of some families whole as it loads, and of none as it casts."""
    start, merged = tmp_path / "start", tmp_path / "merged"
    wanted = persistent_buffers(families.write(family, start))
    make_tokenizer(set("ab")).save_pretrained(start)
    found = persistent_buffers(load_model(str(start), "bfloat16", CPU))
    assert wanted and all(torch.equal(found[name], value) for name, value in wanted.items())
    merge(start, merged, "bfloat16")
    before, after = (load_file(folder / "model.safetensors") for folder in (start, merged))
    biases = {name for name in before if name.endswith("e_score_correction_bias")}
    assert len(biases) == len(wanted) and all(torch.equal(after[name], before[name]) for name in biases)
    assert {after[name].dtype for name in after.keys() - biases} == {torch.bfloat16}


@pytest.mark.parametrize(("model", "size", "why"), [(a_model, 2, "no mixture of experts"), (a_mixture, 3, "8 experts")])
def test_what_cannot_be_dealt_out_is_refused(model: object, size: int, why: str) -> None:
    world = World(CPU)
    world.shape = Shape(expert=size)
    with pytest.raises(SetupError, match=f"expert_parallel={size}: .*{why}"):
        deal_experts(model(), world)  # type: ignore[operator]


def balanced(model: Any, budget: int = 100_000, **given: Any) -> Learner:
    """Of which nothing else learns."""
    algorithm = {"advantage": {"type": "none"}, "router_balance": 0.5}
    config = {"algorithm": algorithm, "tokens_per_micro_batch": budget, **given}
    return Learner(model, TrainerConfig.model_validate(config), 1.0)


def of_family(family: str) -> Any:
    torch.manual_seed(0)
    config = families.config_of(family)
    config.vocab_size = TINY["vocab_size"]
    return with_head(config, "language").from_config(
        config, dtype=torch.float32, attn_implementation=attention_of(config)
    )


@pytest.mark.parametrize(
    ("family", "budget", "kept"),
    [("", 64, True), ("", 100_000, "selective"), *((f, 64, False) for f in sorted(BALANCED & families.TEXT.keys()))],
)
def test_the_loss_of_routers_is_transformers_own_however_rows_lie(family: str, budget: int, kept: bool | str) -> None:
    """Prompts that answers share count for each of them, and padding for none, as in rows of their own."""
    step, model = a_step(0), of_family(family) if family else a_mixture()
    plain = copy.deepcopy(model)
    take_packed_rows(model)
    one = balanced(model, budget, gradient_checkpointing=kept)
    loss, metrics = one.accumulate(step)
    ids = pad_sequence([torch.from_numpy(t.tokens.astype(np.int64)) for t in step.trajectories], batch_first=True)
    real = pad_sequence([torch.ones(len(t.tokens), dtype=torch.long) for t in step.trajectories], batch_first=True)
    plain.set_attn_implementation("eager")
    theirs = plain(input_ids=ids, attention_mask=real, output_router_logits=True).aux_loss
    assert metrics["router_balance"] == pytest.approx(float(theirs.detach()), rel=1e-5)
    assert loss == pytest.approx(0.5 * float(theirs.detach()), rel=1e-5)
    (0.5 * theirs).backward()
    wanted = dict(plain.named_parameters())
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in wanted.values())
    for name, parameter in one.parameters.items():
        its = wanted[name].grad
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(mine, torch.zeros_like(mine) if its is None else its, atol=2e-6, rtol=1e-3)


def test_routers_that_are_balanced_send_tokens_to_more_experts_and_what_has_none_is_refused() -> None:
    model = a_mixture()
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight.mul_(30)
    one = balanced(model, optimizer={"lr": 1e-3})
    found = [one.train(a_step(0))["router_balance"] for _ in range(12)]
    assert found[-1] < 2.2 < 2.6 < found[0], "2 where all are chosen alike, of which each token has two"
    with pytest.raises(SetupError, match="router_balance: qwen3 is no mixture of experts"):
        balanced(a_model())
    with pytest.raises(ValidationError, match="router_balance: with tensor_parallel above 1"):
        balanced(a_mixture(), ranks=2, tensor_parallel=2)
