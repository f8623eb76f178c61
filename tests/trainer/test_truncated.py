"""`truncated: mask`: answers that were cut off are compared with the others, and teach nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.services.learning.batch import TrainingBatch
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.trainer.rank_program import a_model
from tests.trainer.steps import a_step, gradient

CUT = (1, 4, 7)


def cut_step(cut: tuple[int, ...] = CUT) -> TrainingBatch:
    """Three groups of four answers, of which those ``cut`` have ended for want of tokens."""
    step = a_step(0)
    ended = [replace(t, finish="length" if i in cut else "stop") for i, t in enumerate(step.trajectories)]
    return TrainingBatch(ended, step.groups, step.sessions, step.values, {})


def learned(step: TrainingBatch, budget: int = 100_000, **algorithm: Any) -> tuple[float, list[torch.Tensor]]:
    config = {"algorithm": {"entropy_bonus": 0.01, **algorithm}, "tokens_per_micro_batch": budget}
    one = Learner(a_model(), TrainerConfig.model_validate(config), 1.0)
    loss = one.accumulate(step)[0]
    return loss, gradient(one)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("loss", ["ppo_clip", "m2po", "gspo"])
def test_they_count_in_their_groups_mean_and_in_no_divisor(loss: str, aggregation: str) -> None:
    """The same as if nobody had asked what they were, and they had not been there, given the others' advantages."""
    chosen = {"loss": {"type": loss}, "aggregation": aggregation}
    step = cut_step()
    found = learned(step, truncated="mask", **chosen)
    plain = Learner(a_model(), TrainerConfig.model_validate({"algorithm": {"entropy_bonus": 0.01, **chosen}}), 1.0)
    left = np.array([i for i in range(12) if i not in CUT])
    wanted = plain.accumulate(step, left, plain._advantages(step)[0])[0]
    assert found[0] == pytest.approx(wanted, abs=1e-6)
    for mine, its in zip(found[1], gradient(plain), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=1e-4)


def test_the_result_does_not_depend_on_the_micro_batches() -> None:
    (value, mine), (other, its) = (learned(cut_step(), budget, truncated="mask") for budget in (64, 100_000))
    assert value == pytest.approx(other, abs=1e-5)
    for left, right in zip(mine, its, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-3)


def test_where_nothing_was_cut_off_nothing_changes_and_where_all_was_no_weight_does() -> None:
    (value, mine), (other, its) = (learned(cut_step(()), truncated=how) for how in ("mask", "learn"))
    assert value == other and all(torch.equal(left, right) for left, right in zip(mine, its, strict=True))
    config = TrainerConfig.model_validate({"algorithm": {"truncated": "mask"}})
    one = Learner(a_model(), config, 1.0)
    before = {name: p.detach().clone() for name, p in one.parameters.items()}
    metrics = one.train(cut_step(tuple(range(12))))
    assert one.version == 1 and metrics["finished_share"] == 0.0 and np.isfinite(metrics["reward"])
    assert all(torch.equal(before[name], p) for name, p in one.parameters.items())


@pytest.mark.parametrize(
    "chosen",
    [
        {"advantage": {"type": "reinforce_plus_plus"}},
        {"advantage": {"type": "reinforce_plus_plus_baseline"}},
        {"advantage": {"type": "grpo"}, "whiten": True},
    ],
)  # fmt: skip
def test_they_have_no_part_in_what_is_whitened(chosen: dict[str, Any]) -> None:
    """Or the longest of all, which teach nothing, would lift or lower all others."""
    step = cut_step()
    one = Learner(a_model(), TrainerConfig.model_validate({"algorithm": {"truncated": "mask", **chosen}}), 1.0)
    found = one._advantages(step)[0]
    sampled = [
        found[row, : len(t.tokens)][torch.from_numpy(t.loss_mask == 1)] for row, t in enumerate(step.trajectories)
        if row not in CUT
    ]  # fmt: skip
    values = torch.cat(sampled).double()
    assert float(values.mean()) == pytest.approx(0.0, abs=1e-5) and float(values.std()) == pytest.approx(1.0, abs=1e-4)
