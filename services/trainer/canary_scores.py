"""What a learner says of the sequence that every version is checked with."""

from __future__ import annotations

import numpy as np
import torch

from penstock.protocols.experience import UNSAMPLED, Trajectory
from penstock.services.learning.model_learner import ModelLearner
from penstock.services.modeling.parallel.fsdp import forward, reshard


@torch.no_grad()
def score(learner: ModelLearner, tokens: list[int]) -> list[float]:
    """Log-probabilities of all ``tokens`` but the first, at temperature 1. Every rank calls it."""
    size = len(tokens)
    mask = np.ones(size, np.uint8)
    mask[0] = 0
    versions = np.where(mask == 1, 0, UNSAMPLED).astype(np.int32)
    sequence = Trajectory(
        np.array(tokens, np.int32), mask, np.zeros(size, np.float32), versions, text="", finish="length"
    )
    rows = next(iter(learner.passes([sequence], np.zeros(1, np.int64), size))).rows()
    found = forward(learner.model, rows, 1.0)
    reshard(learner.model)
    return learner.world.of_last_stage(found[0, : size - 1].float().cpu().numpy()).tolist()
