"""A micro-batch asks its device for no number: whoever asks a GPU waits for all that it has to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.trainer.rank_program import a_model
from tests.trainer.steps import a_step

ASKING = {
    "aten._local_scalar_dense.default", "aten.nonzero.default", "aten.masked_select.default",
    "aten.masked_scatter_backward.default",
}  # fmt: skip


class Asked(TorchDispatchMode):
    """How often a number was."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        chosen = args[1] if str(function).startswith("aten.index.Tensor") else ()
        by_mask = any(each is not None and each.dtype == torch.bool for each in chosen)
        self.count += str(function) in ASKING or by_mask
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("given", "normalize"), [(0, False), (3, False), (0, True)])
@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce", "cispo", "gspo"])
def test_waits_are_a_steps_and_not_a_micro_batchs(loss: str, given: int, normalize: bool) -> None:
    correction = {"type": "truncated", "normalize": normalize}
    algorithm = {"loss": {"type": loss}, "correction": correction, "entropy_bonus": 0.01}
    counts, passes = [], []
    for tokens in (60, 1000):
        config = {"tokens_per_micro_batch": tokens, "algorithm": algorithm}
        learner = Learner(a_model(), TrainerConfig.model_validate(config), 1.0)
        with Asked() as asked:
            learner.accumulate(a_step(0, given=given))
        counts.append(asked.count)
        step = a_step(0, given=given)
        passes.append(len(learner.plan(step.trajectories, step.groups)))
    assert passes[0] > passes[1] and counts[0] == counts[1] <= 3
