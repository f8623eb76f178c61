"""Run under torchrun by test_ranks.py: a critic of several ranks, whole or an adapter, beside one of a single process,
on the same steps.
Arguments: the folder with the model to begin with in policy/."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from penstock.protocols.columns import VALUES
from penstock.services.critic.config import CriticConfig
from penstock.services.critic.learner import CriticLearner
from penstock.services.learning import checkpoint
from penstock.services.learning.config import Penalties
from penstock.services.modeling.lora import Adapter
from penstock.services.modeling.parallel.fsdp import full
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import Shape, World
from tests.trainer.steps import Tokenizer, a_step

CPU = torch.device("cpu")


def critic_of(folder: Path, world: World, sums: str, lora: bool = False, saved: Path | None = None) -> CriticLearner:
    several = {"epochs": 2, "mini_batches": 2, "tokens_per_micro_batch": 60, "sum_gradients": sums}
    own = {"lora": {"rank": 4}} if lora else {}
    config = CriticConfig.model_validate({"optimizer": {"lr": 1e-2}, **several, **own})
    adapter = Adapter.of(config.lora, saved) if lora else None
    path = folder / "policy" if lora or saved is None else saved
    model = load_trainable(str(path), world, CPU, "float32", "value", adapter)
    return CriticLearner(model, config, 50, 1.0, 0.9, Penalties(), world)


def same_step(one: CriticLearner, other: CriticLearner, seed: int) -> None:
    found = []
    for learner in (one, other):
        step = a_step(seed)
        step = step.with_tokens(VALUES, learner.values(step))
        found.append((step.token_values[VALUES], learner.train(step)))
    (values, metrics), (plain_values, plain_metrics) = found
    for mine, wanted in zip(values, plain_values, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-5)
    for name, wanted in plain_metrics.items():
        np.testing.assert_allclose(metrics[name], wanted, rtol=1e-4, atol=1e-5, err_msg=name)
    for name, parameter in one.parameters.items():
        whole = full(parameter.detach())
        torch.testing.assert_close(whole, other.parameters[name].detach(), rtol=1e-4, atol=1e-5, msg=name)


def main(folder: Path) -> None:
    for shape in (Shape(), Shape(stages=2)):
        world = World.of_torchrun(CPU, shape)
        check(folder, world, folder / f"checkpoints-{shape.stages}", ("micro_batch", "step"))
        check(folder, world, folder / f"adapters-{shape.stages}", ("step",), lora=True)
    dist.destroy_process_group()


def check(folder: Path, world: World, checkpoints: Path, every: Sequence[str], lora: bool = False) -> None:
    for sums in every:
        cut, plain = (critic_of(folder, each, sums, lora) for each in (world, World(CPU)))
        for seed in range(3):
            same_step(cut, plain, seed)
    saver = checkpoint.Saver(cut, Tokenizer(), checkpoints, 1)
    path = saver.begin().result()
    saver.close()
    world.share()  # rank 0 gives it its name
    alone, again = (critic_of(folder, each, "auto", lora, path) for each in (World(CPU), world))
    for learner in (alone, again):
        checkpoint.restore(learner, path)
    same_step(again, alone, 7)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
