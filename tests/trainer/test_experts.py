"""Mixtures of experts: what files and engines call their matrices, and what refuses to deal them out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.services.learning import checkpoint
from penstock.services.modeling.experts import EXPERTS, as_in_files, counted, is_experts
from penstock.services.modeling.parallel.expert import deal_experts
from penstock.services.modeling.parallel.world import Shape, World
from penstock.services.modeling.weight_files import WeightFiles
from penstock.services.runtime.errors import SetupError
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
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
    saver = checkpoint.Saver(learner, Tokenizer(), tmp_path, keep=1)
    path = saver.begin().result()
    saver.close()
    assert "model.layers.1.mlp.experts.7.up_proj.weight" in load_file(path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(path)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, learner.parameters[name]), name


@pytest.mark.parametrize(("model", "size", "why"), [(a_model, 2, "no mixture of experts"), (a_mixture, 3, "8 experts")])
def test_what_cannot_be_dealt_out_is_refused(model: object, size: int, why: str) -> None:
    world = World(CPU)
    world.shape = Shape(expert=size)
    with pytest.raises(SetupError, match=f"expert_parallel={size}: .*{why}"):
        deal_experts(model(), world)  # type: ignore[operator]
