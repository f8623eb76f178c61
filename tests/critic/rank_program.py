"""Run under torchrun by test_ranks.py: a critic of several ranks, whole or an adapter, beside one of a single process,
on the same steps.
Arguments: the folder with the model to begin with in policy/; "shows", where that sees and the steps show pictures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.pipeline.tools.merge import is_critic
from penstock.protocols.columns import REFERENCE
from penstock.services.critic.config import CriticConfig
from penstock.services.critic.learner import CriticLearner
from penstock.services.critic.process_learner import ProcessLearner
from penstock.services.learning import checkpoint
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.config import CheckpointConfig, Penalties
from penstock.services.modeling.lora import Adapter
from penstock.services.modeling.parallel.fsdp import full
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import Shape, World
from penstock.services.modeling.sight import give_learners_sight
from tests.seeing import shown_step
from tests.trainer.steps import Tokenizer, a_step

CPU = torch.device("cpu")
BLIND, SEEING = (Shape(), Shape(stages=2)), (Shape(), Shape(tensor=2), Shape(sequence=2))


def critic_of(
    folder: Path, world: World, sums: str, lora: bool = False, saved: Path | None = None, processes: bool = False
) -> CriticLearner | ProcessLearner:
    several = {"epochs": 2, "mini_batches": 2, "tokens_per_micro_batch": 60, "sum_gradients": sums}
    own: dict[str, Any] = {"lora": {"rank": 4}} if lora else {}
    own["offload"] = "optimizer" if sums == "step" else False  # of a head of values some ranks have no part
    config = CriticConfig.model_validate({"optimizer": {"lr": 1e-2}, **several, **own})
    adapter = Adapter.of(config.lora, saved) if lora else None
    path = folder / "policy" if lora or saved is None else saved
    model = load_trainable(str(path), world, CPU, "float32", "language" if processes else "value", adapter)
    give_learners_sight(model, str(folder / "policy"), "float32", CPU)
    if processes:
        return ProcessLearner(model, config, 50, 0.9, world)
    return CriticLearner(model, config, 50, 1.0, 0.9, Penalties(), world)


def same_step(one: CriticLearner | ProcessLearner, other: CriticLearner | ProcessLearner, step: TrainingBatch) -> None:
    # A twentieth of an update where pictures are shown: Adam divides small gradients by their noise, another one on
    # each kind of processor (2e-4 was seen). Values and metrics, which tell whether it learns alike, are held closer.
    near = 5e-4 if any(trajectory.pictures for trajectory in step.trajectories) else 1e-5
    found = []
    for learner in (one, other):
        valued = step.with_tokens(learner.COLUMN, learner.values(step))
        found.append((valued.token_values[learner.COLUMN], learner.train(valued)))
    (values, metrics), (plain_values, plain_metrics) = found
    for mine, wanted in zip(values, plain_values, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-5)
    for name, wanted in plain_metrics.items():
        np.testing.assert_allclose(metrics[name], wanted, rtol=1e-4, atol=1e-5, err_msg=name)
    for name, parameter in one.parameters.items():
        whole, wanted = full(parameter.detach()), other.parameters[name].detach()
        torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=near, msg=lambda said, name=name: f"{name}: {said}")


def main(folder: Path, *shows: str) -> None:
    for number, shape in enumerate(SEEING if shows else BLIND):
        world = World.of_torchrun(CPU, shape)
        sums = ("step",) if shows else ("micro_batch", "step")
        check(folder, world, folder / f"checkpoints-{number}", sums, bool(shows))
        if not shows:
            check(folder, world, folder / f"processes-{number}", ("step",), False, bool(number), processes=True)
        if shape.tensor == 1:
            check(folder, world, folder / f"adapters-{number}", ("step",), bool(shows), lora=True)
    dist.destroy_process_group()


def check(
    folder: Path, world: World, checkpoints: Path, every: Sequence[str], shows: bool, lora: bool = False,
    processes: bool = False,
) -> None:  # fmt: skip
    def step_of(seed: int) -> TrainingBatch:
        step = shown_step(a_step(seed), str(folder / "policy")) if shows else a_step(seed)
        return step.with_tokens(REFERENCE, [t.logprobs for t in step.trajectories]) if processes else step

    for sums in every:
        cut, plain = (critic_of(folder, each, sums, lora, processes=processes) for each in (world, World(CPU)))
        for seed in range(3):
            same_step(cut, plain, step_of(seed))
    saver = checkpoint.Saver(cut, Tokenizer(), checkpoints, CheckpointConfig(keep=1))
    path = saver.begin().result()
    saver.close()
    world.share()  # rank 0 gives it its name
    assert lora or processes or is_critic(path), "of a pipeline, too, whose first rank has no head"
    alone, again = (critic_of(folder, each, "auto", lora, path, processes) for each in (World(CPU), world))
    for learner in (alone, again):
        checkpoint.restore(learner, path)
    same_step(again, alone, step_of(7))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
