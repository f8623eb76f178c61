"""PRIME's critic: what it says of each token, what it learns from outcomes, and what the policy makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pipeline.config import ConfigError, load
from penstock.protocols.columns import PROCESS, REFERENCE
from penstock.services.critic.config import CriticConfig
from penstock.services.critic.process_learner import ProcessLearner
from penstock.services.learning.batch import TrainingBatch
from penstock.services.modeling.parallel.fsdp import forward
from penstock.services.runtime import registry
from penstock.services.trainer.algorithms.advantages.prime import prime
from tests.trainer.rank_program import a_model
from tests.trainer.steps import a_step

BETA, RIGHT = 0.3, 0.6


def a_learner(**chosen: Any) -> ProcessLearner:
    config = {"optimizer": {"lr": 1e-2}, "beta": BETA, "right": RIGHT, **chosen}
    return ProcessLearner(a_model(), CriticConfig.model_validate(config), 50, 0.9)


def asked(learner: ProcessLearner, seed: int = 0) -> TrainingBatch:
    """A step with the reference's log-probabilities, those of the model that the learner began as, and with what it
    says of it."""
    step = a_step(seed)
    reference = a_learner()
    said = reference.evaluate(step, lambda rows: forward(reference.model, rows, 0.9))
    step = step.with_tokens(REFERENCE, said)
    return step.with_tokens(PROCESS, learner.values(step))


def test_a_token_is_worth_what_it_is_likelier_than_under_the_reference() -> None:
    learner = a_learner()
    assert all(not values.any() for values in asked(learner).token_values[PROCESS]), "it begins as the reference"
    learner.train(asked(learner))
    step = asked(learner)
    for trajectory, values in zip(step.trajectories, step.token_values[PROCESS], strict=True):
        logits = [
            each.model(torch.from_numpy(trajectory.tokens.astype(np.int64))[None]).logits[0] / 0.9
            for each in (learner, a_learner())
        ]
        wanted = torch.zeros(len(trajectory.tokens))
        for place in np.flatnonzero(trajectory.loss_mask):
            mine, theirs = (of[place - 1].log_softmax(-1)[trajectory.tokens[place]] for of in logits)
            wanted[place] = BETA * (mine - theirs).detach()
        np.testing.assert_allclose(values, wanted, atol=1e-5)


def test_its_gradient_is_that_of_the_papers_cross_entropy_whatever_the_cut() -> None:
    found = []
    for tokens in (60, 8192):
        learner = a_learner(tokens_per_micro_batch=tokens)
        step = asked(learner, 1)
        step.values["reward"][2] = np.nan
        rewarded = np.flatnonzero(step.rewarded)
        loss = learner._accumulate(step, rewarded)
        found.append((loss, [parameter.grad for parameter in learner.parameters.values()]))
    plain, losses = a_learner(), []
    for i in rewarded:
        tokens = torch.from_numpy(step.trajectories[i].tokens.astype(np.int64))
        logs = (plain.model(tokens[None]).logits[0, :-1] / 0.9).log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        mask = torch.from_numpy(step.trajectories[i].loss_mask[1:].astype(np.float32))
        worth = BETA * ((logs - torch.from_numpy(step.token_values[REFERENCE][i][1:])) * mask).sum()
        right = step.rewards[i] >= RIGHT
        losses.append(-(torch.sigmoid(worth) if right else 1 - torch.sigmoid(worth)).log())
    wanted = torch.stack(losses).mean()
    wanted.backward()
    for loss, gradients in found:
        assert loss == pytest.approx(wanted.item(), rel=1e-5)
        for mine, parameter in zip(gradients, plain.parameters.values(), strict=True):
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-4, atol=1e-7)


def test_it_learns_which_answers_are_right() -> None:
    learner = a_learner(optimizer={"lr": 3e-3})
    first = learner.train(asked(learner))
    for _ in range(40):
        last = learner.train(asked(learner))
    assert last["critic_accuracy"] == 1.0 and last["critic_loss"] < 0.3 * first["critic_loss"]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 999), gamma=st.sampled_from([1.0, 0.9]), share=st.sampled_from([0.0, 1.0, 5.0]))
def test_advantages_are_the_papers(seed: int, gamma: float, share: float) -> None:
    random = np.random.default_rng(seed)
    groups, mask = np.array([0, 0, 0, 1, 1, 2]), random.random((6, 7)) < 0.7
    mask[:, 2] = True
    rewards, process = random.random(6), random.normal(size=(6, 7))
    tokens = np.zeros((6, 7))
    tokens[np.arange(6), [np.flatnonzero(row)[-1] for row in mask]] = rewards
    given = (torch.from_numpy(each) for each in (tokens, mask.astype(np.float64), groups, process))
    found = prime(*given, share=share, gamma=gamma)
    for i in range(6):
        others = [j for j in range(6) if groups[j] == groups[i] and j != i]
        outcome = rewards[i] - (np.mean([rewards[j] for j in others]) if others else 0.0)
        baseline = np.mean([process[j][mask[j]].mean() for j in others]) if others else 0.0
        places = np.flatnonzero(mask[i])
        for number, place in enumerate(places):
            later = [gamma**k * (process[i, s] - baseline) for k, s in enumerate(places[number:])]
            assert float(found[i, place]) == pytest.approx(outcome + share * sum(later))
    assert not found.numpy()[~mask].any()


def test_a_critic_of_its_kind_and_a_reference_come_with_it() -> None:
    config = load(Path("configs/quickstart.yaml"), ["trainer.algorithm.preset=prime", "trainer.algorithm.kl={}"])
    assert {"critic", "reference"} <= {kind for kind, spec in registry.actors(config).items() if spec.names(config)}
    (column,) = config.columns.of_step
    assert column.name == config.critic_column == PROCESS
    with pytest.raises(ConfigError, match="a critic learns beside the trainer"):
        load(
            Path("configs/quickstart.yaml"),
            ["trainer.algorithm.preset=prime", "trainer.lora.rank=4", "reference.in_trainer=true"],
        )
