"""bf16 is computed with, fp32 is trained: unit by unit, as a GPU wants it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.conftest import TINY
from tests.trainer.steps import a_step

CPU = torch.device("cpu")


@pytest.fixture
def learner(tmp_path: Path) -> Learner:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**(TINY | {"num_hidden_layers": 6}))).save_pretrained(tmp_path)
    world = World(CPU)
    config = TrainerConfig.model_validate({"optimizer": {"lr": 1e-3}})
    return Learner(load_trainable(str(tmp_path), world, CPU, "bfloat16"), config, 1.0, world)


def test_casts_live_as_long_as_their_unit_is_computed(learner: Learner) -> None:
    """Autocast kept a bf16 copy of every weight until the forward's end, and its residual stream was fp32."""
    layers, whole, streams = learner.model.model.layers, [], []

    def look(_module: object, _inputs: object, output: torch.Tensor) -> None:
        whole.append(sum(not isinstance(layer.mlp.up_proj.weight, DTensor) for layer in layers))
        streams.append(output.dtype)

    for layer in layers:
        layer.mlp.register_forward_hook(look)
    learner.train(a_step(1))
    assert max(whole) == 1, "layers that are gathered and cast at once"
    assert set(streams) == {torch.bfloat16}


def test_the_master_copy_its_gradient_and_moments_are_fp32(learner: Learner) -> None:
    before = {name: p.detach().full_tensor().clone() for name, p in learner.parameters.items()}
    learner.train(a_step(1))
    for name, parameter in learner.parameters.items():
        assert parameter.dtype == torch.float32 and parameter.grad is not None
        assert parameter.grad.dtype == torch.float32, name
        assert all(value.dtype == torch.float32 for value in learner.optimizer.state[parameter].values())
    assert any(not torch.equal(p.detach().full_tensor(), before[name]) for name, p in learner.parameters.items())


def test_the_step_is_that_of_fp32_up_to_rounding(learner: Learner, tmp_path: Path) -> None:
    world = World(CPU)
    exact = Learner(load_trainable(str(tmp_path), world, CPU, "float32"), learner._learning, 1.0, world)
    one, other = learner.train(a_step(2)), exact.train(a_step(2))
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.05)
    assert one["entropy"] == pytest.approx(other["entropy"], rel=0.01)
