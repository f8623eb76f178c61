"""The critic's learner: what it learns, whatever the cut, and where its loss is flat."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocols.columns import VALUES
from penstock.services.critic.config import CriticConfig, CriticOptimizerConfig
from penstock.services.critic.learner import CriticLearner
from penstock.services.critic.value_loss import value_loss
from penstock.services.learning import checkpoint
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.config import CheckpointConfig, ConstraintConfig, Penalties
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.values import value_head
from tests.trainer.rank_program import a_model
from tests.trainer.steps import Tokenizer, a_step
from tests.trainer.test_waits import Asked

CPU = torch.device("cpu")


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A language model as a run starts from it."""
    a_model().save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def critic_of(
    path: Path, tokens: int = 8192, lr: float = 1e-2, warmup_steps: int = 0, penalties: Penalties | None = None
) -> CriticLearner:
    config = CriticConfig(
        tokens_per_micro_batch=tokens, optimizer=CriticOptimizerConfig(lr=lr), warmup_steps=warmup_steps
    )
    model = load_trainable(str(path), World(CPU), CPU, "float32", "value")
    return CriticLearner(model, config, 50, 1.0, 1.0, penalties or Penalties())


def valued(learner: CriticLearner, step: TrainingBatch) -> TrainingBatch:
    return step.with_tokens(VALUES, learner.values(step))


def test_its_learning_rate_is_its_own_whatever_else_is_said_of_its_optimizer() -> None:
    for told in ({}, {"optimizer": {"schedule": "cosine"}}, {"optimizer": {"type": "muon", "max_grad_norm": 0.5}}):
        assert CriticConfig.model_validate(told).optimizer.lr == 1e-5


def test_it_begins_with_the_policys_body_and_values_of_zero(policy: Path) -> None:
    learner, step = critic_of(policy), a_step(0)
    assert all(not values.any() for values in learner.values(step))
    body = dict(a_model().model.named_parameters())
    assert all(torch.equal(learner.parameters[f"model.{name}"], value) for name, value in body.items())


def test_it_learns_what_each_answer_is_worth(policy: Path) -> None:
    learner, step = critic_of(policy, lr=3e-2), a_step(0)
    first = learner.train(valued(learner, step))
    for _ in range(80):
        last = learner.train(valued(learner, step))
    assert last["critic_loss"] < 0.1 * first["critic_loss"] and last["critic_explained_variance"] > 0.75
    found = valued(learner, step)
    ends = []
    for values, trajectory, reward in zip(found.token_values[VALUES], step.trajectories, step.rewards, strict=True):
        assert not values[trajectory.loss_mask == 0].any()
        ends.append(abs(values[trajectory.loss_mask == 1][-1] - reward))
    assert np.median(ends) < 0.1  # of a single token, nothing can be known but the mean over its group


def test_waits_are_a_steps_and_not_a_micro_batchs(policy: Path) -> None:
    step, counts, passes = a_step(0).with_tokens(VALUES, [t.logprobs for t in a_step(0).trajectories]), [], []
    for tokens in (60, 1000):
        learner = critic_of(policy, tokens)
        with Asked() as asked:
            learner.train(step)
        counts.append(asked.count)
        passes.append(len(learner.plan(step.trajectories, step.groups)))
    assert passes[0] > passes[1] and counts[0] == counts[1]


def test_a_multiplier_waits_while_the_policy_stands_still(policy: Path) -> None:
    cost = ConstraintConfig(column="cost", limit=3.0, initial=0.5, rate=0.1)
    learner = critic_of(policy, warmup_steps=2, penalties=Penalties(constraints=(cost,)))
    risen = {"multiplier/cost": pytest.approx(0.5 * np.exp(0.1 * (9 - 3))), "multiplier_began/cost": 0.5}
    for seen in ({}, {}, risen):
        step = a_step(0)
        step = replace(step, values={**step.values, "cost": np.full(len(step.trajectories), 9.0, np.float32)})
        learner.train(valued(learner, step))
        assert learner.state == seen


def test_the_step_does_not_depend_on_the_cut(policy: Path) -> None:
    step, gradients = a_step(1), []
    for tokens in (8192, 16):
        learner = critic_of(policy, tokens)
        with torch.no_grad():
            value_head(learner.model).weight.normal_(generator=torch.Generator().manual_seed(0))
        metrics = learner.train(valued(learner, step))
        gradients.append((metrics["critic_loss"], metrics["critic_grad_norm"], metrics["critic_explained_variance"]))
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-4)


def test_a_trajectory_without_reward_has_no_part_in_it(policy: Path) -> None:
    step = a_step(2)
    step.values["reward"][:4] = np.nan
    learner, other = critic_of(policy), critic_of(policy)
    rest = TrainingBatch(
        step.trajectories[4:], step.groups[4:], step.sessions[4:], {"reward": step.values["reward"][4:]}, {}
    )
    one, two = learner.train(valued(learner, step)), other.train(valued(other, rest))
    assert one["critic_loss"] == pytest.approx(two["critic_loss"], rel=1e-5)
    assert one["critic_grad_norm"] == pytest.approx(two["critic_grad_norm"], rel=1e-4)


def test_it_goes_on_from_a_checkpoint_as_if_nothing_had_been(policy: Path, tmp_path: Path) -> None:
    learner, step = critic_of(policy), a_step(3)
    learner.train(valued(learner, step))
    saver = checkpoint.Saver(learner, Tokenizer(), tmp_path / "checkpoints", CheckpointConfig(keep=2))
    path = saver.begin([{"step": 0, "groups": [0, 1, 2]}]).result()
    saver.close()
    other = critic_of(path)
    assert checkpoint.restore(other, path) == [{"step": 0, "groups": [0, 1, 2]}] and other.version == 1
    for one in (learner, other):
        one.train(valued(one, a_step(4)))
    assert all(torch.equal(other.parameters[name], value) for name, value in learner.parameters.items())


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_the_loss_is_flat_exactly_where_the_value_has_moved_far_enough(seed: int) -> None:
    """Beyond the clip, towards the return: the clipped square is the larger one, and has no gradient."""
    torch.manual_seed(seed)
    old, returns = torch.randn(2, 30, dtype=torch.float64)
    values = (old + 0.5 * torch.randn(30, dtype=torch.float64)).requires_grad_()
    losses, clipped = value_loss(values, old, returns, 0.2)
    losses.sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad == 0, clipped & ((values - old).abs() > 0.2))
    assert (losses.detach() >= (values - returns).detach().square() / 2).all()


def test_it_begins_at_0_also_where_the_files_are_of_another_layout(policy: Path, tmp_path: Path) -> None:
    """A base model's alone, say, whose names lack the head's prefix: they are loaded whole."""
    a_model().model.save_pretrained(tmp_path / "base")
    for path in (policy, tmp_path / "base"):
        head = value_head(load_trainable(str(path), World(CPU), CPU, "float32", "value"))
        assert all(not parameter.any() for parameter in head.parameters())


def test_it_computes_in_16_bits_and_learns_in_32(policy: Path) -> None:
    world = World(CPU)
    try:
        model = load_trainable(str(policy), world, CPU, "bfloat16", "value")
        learner = CriticLearner(model, CriticConfig(), 50, 1.0, 1.0, Penalties(), world)
        plain, step = critic_of(policy), a_step(5)
        for one in (learner, plain):
            with torch.no_grad():
                value_head(one.model).weight.fill_(0.05)
        for found, wanted in zip(learner.values(step), plain.values(step), strict=True):
            np.testing.assert_allclose(found, wanted, atol=0.05)
        metrics = [one.train(valued(one, step)) for one in (learner, plain)]
        assert metrics[0]["critic_grad_norm"] == pytest.approx(metrics[1]["critic_grad_norm"], rel=0.1)
        assert all(parameter.dtype == torch.float32 for parameter in learner.parameters.values())
    finally:
        world.close()
