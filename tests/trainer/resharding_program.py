"""Run under torchrun by test_resharding.py: loads a checkpoint, trains a step, saves. Arguments: the checkpoint, where
to save, what to compute in, how many steps, and by which optimizer."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from penstock.services.learning import checkpoint
from penstock.services.learning.config import CheckpointConfig
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.trainer.steps import Tokenizer, a_step

CPU = torch.device("cpu")


def main(path: Path, target: Path, dtype: str, steps: int, optimizer: str) -> Learner:
    world = World.of_torchrun(CPU)
    about = {"optimizer": {"type": optimizer, "lr": 1e-3}, "tokens_per_micro_batch": 60}
    config = TrainerConfig.model_validate(about)
    learner = Learner(load_trainable(str(path), world, CPU, dtype), config, 1.0, world)
    if (path / "trainer").is_dir():
        checkpoint.restore(learner, path)
    for seed in range(steps):
        learner.train(a_step(seed))
    saver = checkpoint.Saver(learner, Tokenizer(), target, CheckpointConfig(keep=1))
    saver.begin()
    saver.close()
    if world.size > 1:
        world.close()
    return learner


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
