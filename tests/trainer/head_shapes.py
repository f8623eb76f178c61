"""Of tests.trainer.shapes_program: ranks that compute in 16 bits, with the head in fp32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from penstock.services.learning.loss_scale import SCALE
from penstock.services.modeling.dtypes import DTYPES
from penstock.services.modeling.head import compute_head_in
from penstock.services.modeling.parallel.fsdp import full
from penstock.services.modeling.parallel.tensor import sum_partial
from penstock.services.modeling.parallel.world import World
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from penstock.services.trainer.rank_setup import load_policy
from tests.trainer.steps import a_step

ROUNDED = 0.1
"""Of a gradient in 16 bits: how far it is from that in fp32, as a share of its length."""


def check_head(start: str, half: str, config: TrainerConfig, alone: TrainerConfig, world: World, single: World) -> None:
    """Its logits are those of the gathered, cast weights in fp32, and loss and gradients those of one process in fp32
    up to rounding."""
    seen: list[bool] = []

    def look(head: Any, inputs: tuple[torch.Tensor], logits: torch.Tensor) -> None:
        (hidden,) = inputs
        assert hidden.dtype == head.weight.dtype == DTYPES[half] and logits.dtype == torch.float32
        seen.append(torch.equal(logits, F.linear(hidden.float(), head.weight.float())))

    model = load_policy(start, start, world, half, config)
    compute_head_in(model, "float32")
    if world.last_stage:
        model.get_output_embeddings().register_forward_hook(look)
    cut = Learner(model, config, 1.0, world)
    plain = Learner(load_policy(start, start, single, "float32", alone), alone, 1.0, single)
    losses = [learner.accumulate(a_step(0))[0] for learner in (cut, plain)]
    assert bool(seen) == world.last_stage and all(seen)
    assert abs(losses[0] - losses[1]) <= ROUNDED * abs(losses[1]), losses
    sum_partial(cut.model, cut.parameters, world)
    if cut.stage:
        cut.stage.sum_tied(cut.parameters)
    assert cut.loss_scale.used == (half == "float16")
    assert not cut.loss_scale.used or cut.loss_scale.undo(cut.parameters.values(), world)
    for name, parameter in cut.parameters.items():
        mine, wanted = full(parameter.grad), plain.parameters[name].grad
        off = float((mine - wanted).norm() / wanted.norm().clamp(min=1e-6))
        assert off <= ROUNDED, (name, off)
    if cut.loss_scale.used:  # all ranks compute it again, as often
        cut.state[SCALE] = 2.0**60
        assert cut.train(a_step(1))["skipped"] and cut.loss_scale.value == 2.0**59
