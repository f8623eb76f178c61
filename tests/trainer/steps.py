"""A step to train on, and the part of a tokenizer that a checkpoint needs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.services.learning.batch import TrainingBatch
from tests.conftest import make_group


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def a_step(seed: int) -> TrainingBatch:
    random = np.random.default_rng(seed)
    groups = [make_group(random, number) for number in range(3)]
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = random.random(12).astype(np.float32)
    return TrainingBatch(trajectories, np.repeat(np.arange(3), 4), np.arange(12), {"reward": rewards}, {})
