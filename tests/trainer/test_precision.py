"""16 bits are computed with, fp32 is trained: unit by unit, as a GPU wants it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.services.learning.loss_scale import FIRST, GROWS_AFTER, ROOM, SCALE
from penstock.services.modeling.dtypes import HALVES
from penstock.services.modeling.parallel.fsdp import full
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.conftest import TINY
from tests.trainer.steps import a_step

CPU = torch.device("cpu")


def learns_in(dtype: str, path: Path) -> Learner:
    world, config = World(CPU), TrainerConfig.model_validate({"optimizer": {"lr": 1e-3}})
    return Learner(load_trainable(str(path), world, CPU, dtype), config, 1.0, world)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**(TINY | {"num_hidden_layers": 6}))).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(params=HALVES)
def learner(saved: Path, request: pytest.FixtureRequest) -> Learner:
    return learns_in(request.param, saved)


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
    assert set(streams) == {learner.model.penstock_half}


def test_the_master_copy_its_gradient_and_moments_are_fp32(learner: Learner) -> None:
    before = {name: p.detach().full_tensor().clone() for name, p in learner.parameters.items()}
    learner.train(a_step(1))
    for name, parameter in learner.parameters.items():
        assert parameter.dtype == torch.float32 and parameter.grad is not None
        assert parameter.grad.dtype == torch.float32, name
        assert all(value.dtype == torch.float32 for value in learner.optimizer.state[parameter].values())
    assert any(not torch.equal(p.detach().full_tensor(), before[name]) for name, p in learner.parameters.items())


def test_the_step_is_that_of_fp32_up_to_rounding(learner: Learner, saved: Path) -> None:
    one, other = learner.train(a_step(2)), learns_in("float32", saved).train(a_step(2))
    rounded = 0.05 if learner.model.penstock_half is torch.bfloat16 else 0.005
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=rounded)
    assert one["entropy"] == pytest.approx(other["entropy"], rel=0.01)


def test_a_gradient_beyond_fp16_is_computed_again_and_nothing_is_skipped(saved: Path) -> None:
    one, other = learns_in("float16", saved), learns_in("float16", saved)
    one.state[SCALE] = 2.0**27
    found, wanted = one.train(a_step(2)), other.train(a_step(2))
    assert wanted["loss_scale"] == FIRST < found["loss_scale"] < 2.0**27 and not found["skipped"]
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-3), "the scale is taken off again"
    assert one.flops.total == other.flops.total > 0, "what is computed again counts once"
    one.state[SCALE] = 2.0**60
    before = [p.detach().full_tensor().clone() for p in one.parameters.values()]
    found = one.train(a_step(3))
    assert found["skipped"] and found["loss_scale"] == 2.0**59, "what never fits ends, and costs the scale no more"
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(one.parameters.values(), before, strict=True))


def test_small_gradients_are_not_lost_in_fp16(saved: Path) -> None:
    """Each number of them, beside those of fp32: without a scale a part would be 0."""

    def small(scale: float) -> float:
        learner = learns_in("float16", saved)
        learner.state[SCALE] = scale
        learner.begin_update()
        learner.gradient(lambda: learner.accumulate(a_step(2)))
        every = torch.cat([full(p.grad).flatten() for p in learner.parameters.values()])
        return float((every == 0).float().mean())

    assert small(2.0**-8) > small(FIRST) + 0.05


def test_the_scale_grows_where_there_is_room(saved: Path) -> None:
    learner = learns_in("float16", saved)
    learner.state[ROOM] = GROWS_AFTER - 1.0
    assert learner.train(a_step(1))["loss_scale"] == 2 * FIRST and learner.state[ROOM] == 0
