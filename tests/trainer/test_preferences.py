"""Online DPO's gradient is that of the papers' losses, and SPPO's that of its square."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from penstock.pipeline.config import load
from penstock.protocols.columns import REFERENCE
from penstock.services.runtime import registry
from penstock.services.trainer.algorithms.advantages.online_dpo import online_dpo
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.trainer.rank_program import a_model
from tests.trainer.steps import a_step

T = 0.8


def a_learner(**algorithm: Any) -> Learner:
    config = {"algorithm": algorithm, "tokens_per_micro_batch": 60}
    return Learner(a_model(), TrainerConfig.model_validate(config), T)


def logs(model: Any, trajectory: Any) -> torch.Tensor:
    """Of its sampled tokens, one by one, with their gradient."""
    tokens = torch.from_numpy(trajectory.tokens.astype(np.int64))
    found = (model(tokens[None]).logits[0, :-1] / T).log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    return found * torch.from_numpy(trajectory.loss_mask[1:].astype(np.float32))


def gradients(learner: Learner) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in learner.parameters.values() if parameter.grad is not None]


@pytest.mark.parametrize("shape", ["sigmoid", "ipo"])
def test_the_gradient_is_dpos(shape: str) -> None:
    step, beta = a_step(3), 0.4
    random = np.random.default_rng(0)
    reference = [(t.logprobs - 0.3 * random.random(len(t.tokens))).astype(np.float32) for t in step.trajectories]
    step = step.with_tokens(REFERENCE, [r * t.loss_mask for r, t in zip(reference, step.trajectories, strict=True)])
    step.values["reward"][4:8] = 0.5  # which no pair can be made of
    learner = a_learner(preset="online_dpo", advantage={"beta": beta, "shape": shape})
    learner.accumulate(step)
    model, losses = a_model(), []
    for first in (0, 8):
        rows = range(first, first + 4)
        best, worst = max(rows, key=lambda i: step.rewards[i]), min(rows, key=lambda i: step.rewards[i])
        margins = [
            logs(model, step.trajectories[i]).sum() - torch.from_numpy(step.token_values[REFERENCE][i][1:]).sum()
            for i in (best, worst)
        ]
        apart = margins[0] - margins[1]
        losses.append(-logsigmoid(beta * apart) if shape == "sigmoid" else (apart - 1 / (2 * beta)).square())
    (torch.stack(losses).sum() / 3).backward()  # a mean over groups, of which one has no pair
    wanted = [parameter.grad for parameter in model.parameters()]
    for mine, theirs in zip(gradients(learner), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_the_gradient_is_that_of_sppos_square() -> None:
    step, eta, model, losses = a_step(5), 3.0, a_model(), []
    random = np.random.default_rng(1)
    for i, each in enumerate(step.trajectories):  # near the policy: beyond a ratio of e^20 it is bounded
        near = np.r_[0.0, logs(model, each).detach().numpy() + 0.2 * random.normal(size=len(each.tokens) - 1)]
        step.trajectories[i] = replace(each, logprobs=(near * each.loss_mask).astype(np.float32))
    learner = a_learner(preset="sppo", loss={"eta": eta})
    learner.accumulate(step)
    for i, trajectory in enumerate(step.trajectories):
        group = step.rewards[step.groups == step.groups[i]]
        ratio = (logs(model, trajectory) - torch.from_numpy(trajectory.logprobs[1:] * trajectory.loss_mask[1:])).sum()
        losses.append((ratio - eta * float(step.rewards[i] - group.mean())).square() / (2 * eta))
    torch.stack(losses).mean().backward()
    for mine, theirs in zip(gradients(learner), [p.grad for p in model.parameters()], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_a_reference_comes_with_it_and_no_critic() -> None:
    config = load(Path("configs/quickstart.yaml"), ["trainer.algorithm={preset: online_dpo}"])
    there = {kind for kind, spec in registry.actors(config).items() if spec.names(config)}
    assert "reference" in there and "critic" not in there


def test_an_agents_session_is_one_of_a_pair() -> None:
    """Of three branches and one the gradient is that of two answers."""
    scores, sessions, mask = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 1]), torch.ones(4, 2)
    policy, zeros = torch.tensor([[0.1, 0.2], [0.3, 0.0], [0.0, 0.4], [0.5, 0.0]]), torch.zeros(4, 2)
    about = mask, torch.zeros(4, dtype=torch.int64), zeros, policy, scores, sessions
    found = online_dpo(zeros, *about, beta=0.5, shape="sigmoid")
    pull = 2 * 0.5 * float(torch.sigmoid(torch.tensor(-0.5 * (1.0 - 0.5))))
    assert found[:3].unique().tolist() == [pytest.approx(pull)] and float(found[3, 0]) == pytest.approx(-pull)
