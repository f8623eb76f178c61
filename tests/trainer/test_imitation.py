"""`imitate`: good answers become likelier, beside whatever the policy loss wants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.trainer.rank_program import a_model
from tests.trainer.steps import a_step, gradient


def learner(budget: int = 100_000, **imitate: Any) -> Learner:
    config = {"algorithm": {"imitate": imitate}, "tokens_per_micro_batch": budget}
    return Learner(a_model(), TrainerConfig.model_validate(config), 1.0)


@pytest.mark.parametrize("budget", [64, 100_000])
def test_the_term_is_the_mean_over_the_good_answers_tokens_by_plain_transformers(budget: int) -> None:
    step, plain, one = a_step(0), learner(), learner(budget, coefficient=0.1, above=0.5)
    good = np.flatnonzero(step.rewards >= 0.5)
    assert 0 < len(good) < len(step.trajectories)
    total, count = torch.zeros(()), 0
    for trajectory in (step.trajectories[i] for i in good):
        ids, mask = torch.from_numpy(trajectory.tokens.astype(np.int64)), torch.from_numpy(trajectory.loss_mask[1:])
        logs = plain.model(ids[None]).logits[0].float().log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        total, count = total - (logs * mask).sum(), count + int(mask.sum())
    term = torch.autograd.grad(total / count, list(plain.parameters.values()))
    without = plain.accumulate(step)[0]
    found, metrics = one.accumulate(step)
    assert metrics["imitated_nll"] == pytest.approx(float(total.detach()) / count, rel=1e-5)
    assert found == pytest.approx(without + 0.1 * float(total.detach()) / count, abs=1e-5)
    for mine, policy, its in zip(gradient(one), gradient(plain), term, strict=True):
        torch.testing.assert_close(mine, policy + 0.1 * its, atol=1e-5, rtol=1e-3)


def test_where_no_answer_is_good_nothing_is_imitated() -> None:
    step, plain, one = a_step(0), learner(), learner(coefficient=0.1, above=2.0)
    without, (found, metrics) = plain.accumulate(step)[0], one.accumulate(step)
    assert found == without and "imitated_nll" not in metrics, "of an update without a good answer nothing is said"
    assert all(torch.equal(mine, its) for mine, its in zip(gradient(one), gradient(plain), strict=True))
