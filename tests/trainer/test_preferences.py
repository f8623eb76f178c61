"""Online DPO's gradient is that of the papers' losses, and SPPO's and GVPO's those of their squares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid

from penstock.pipeline.config import load
from penstock.protocols.columns import REFERENCE, REWARD
from penstock.protocols.experience import no_rewards
from penstock.services.learning.batch import TrainingBatch, of_pairs
from penstock.services.runtime import registry
from penstock.services.trainer.algorithms.advantages.gvpo import gvpo
from penstock.services.trainer.algorithms.advantages.online_dpo import online_dpo
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from penstock.services.turns.given import preferred
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


def pairs(seed: int, best: int, worst: int) -> TrainingBatch:
    """Groups of so many given answers of each kind, as rollouts give them."""
    step, of_group = a_step(seed, given=1), best + worst
    count = 12 // of_group
    paired = [
        preferred(replace(each, rewards=no_rewards()), place % of_group < best)
        for place, each in enumerate(step.trajectories[: count * of_group])
    ]
    random = np.random.default_rng(seed)
    reference = [(-random.random(len(t.tokens)) * t.loss_mask).astype(np.float32) for t in paired]
    numbers, values = np.repeat(np.arange(count), of_group), {REWARD: of_pairs(paired)}
    found = TrainingBatch(paired, numbers, np.arange(len(paired)), values, {})
    return found.with_tokens(REFERENCE, reference)


@pytest.mark.parametrize("shape", ["sigmoid", "ipo"])
@pytest.mark.parametrize(("best", "worst", "nll"), [(1, 1, 0.0), (1, 1, 0.3), (2, 1, 0.3), (2, 2, 0.0)])
def test_the_gradient_of_given_pairs_is_dpos_and_rpos(shape: str, best: int, worst: int, nll: float) -> None:
    step, beta, of_group = pairs(4, best, worst), 0.4, best + worst
    assert step.rewards.tolist() == ([1.0] * best + [0.0] * worst) * (12 // of_group)
    algorithm: dict[str, Any] = {"preset": "dpo", "advantage": {"beta": beta, "shape": shape}}
    learner = a_learner(**algorithm, **({"imitate": {"coefficient": nll, "above": 1.0}} if nll else {}))
    learner.accumulate(step)
    model, losses, likelihoods, apart, size = a_model(), [], [], [], 0.0
    for first in range(0, len(step.trajectories), of_group):
        said = [logs(model, step.trajectories[i]) for i in range(first, first + of_group)]
        beside = [torch.from_numpy(step.token_values[REFERENCE][first + k][1:]).sum() for k in range(of_group)]
        margins = [own.sum() - theirs for own, theirs in zip(said, beside, strict=True)]
        of_pairs_here = [margins[one] - margins[other] for one in range(best) for other in range(best, of_group)]
        apart += of_pairs_here
        each = torch.stack(of_pairs_here)
        losses.append((-logsigmoid(beta * each) if shape == "sigmoid" else (each - 1 / (2 * beta)).square()).mean())
        likelihoods += [-own.sum() for own in said[:best]]
        size += sum(step.trajectories[first + k].sampled for k in range(best))
    (torch.stack(losses).mean() + nll * torch.stack(likelihoods).sum() / size).backward()
    for mine, theirs in zip(gradients(learner), [p.grad for p in model.parameters()], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    told, found = learner.train(step), torch.stack(apart).detach()
    assert told["preferred_margin"] == pytest.approx(float(found.mean()), rel=1e-4)
    assert told["preferred_likelier"] == pytest.approx(float((found > 0).float().mean()))
    assert told["given_tokens"] == told["tokens"] and ("imitated_nll" in told) == bool(nll)


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


@pytest.mark.parametrize("per_token", [False, True])
def test_the_gradient_is_that_of_gvpos_square(per_token: bool) -> None:
    step, beta, model, losses = a_step(4), 0.3, a_model(), []
    random = np.random.default_rng(2)
    reference = [(t.logprobs - 0.3 * random.random(len(t.tokens))) * t.loss_mask for t in step.trajectories]
    step = step.with_tokens(REFERENCE, [each.astype(np.float32) for each in reference])
    aggregation = "seq-mean-token-mean" if per_token else "seq-mean-token-sum"
    chosen = {"advantage": {"beta": beta, "per_token": per_token}, "aggregation": aggregation}
    learner = a_learner(preset="gvpo", **chosen)
    learner.accumulate(step)
    far = []
    for place, trajectory in enumerate(step.trajectories):
        parts = logs(model, trajectory) - torch.from_numpy(step.token_values[REFERENCE][place][1:])
        far.append(parts.sum() / (trajectory.loss_mask[1:].sum() if per_token else 1))
    for number in np.unique(step.groups):
        mine = np.flatnonzero(step.groups == number)
        h, rewards = torch.stack([far[place] for place in mine]), torch.from_numpy(step.rewards[mine])
        losses.append((rewards - rewards.mean() - beta * (h - h.mean())).square().sum() / (2 * beta))
    (torch.stack(losses).sum() / len(step.trajectories)).backward()
    for found, theirs in zip(gradients(learner), [p.grad for p in model.parameters()], strict=True):
        torch.testing.assert_close(found, theirs, rtol=1e-3, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), beta=st.floats(0.05, 2.0))
def test_gvpo_is_at_rest_where_answers_are_as_likely_as_their_rewards_say(seed: int, beta: float) -> None:
    torch.manual_seed(seed)
    groups, scores, mask = torch.tensor([3, 3, 3, 8, 8, 9]), torch.randn(6), torch.rand(6, 4) > 0.3
    mask[:, 0] = True
    reference, of_group = torch.randn(6, 4), torch.randn(3)[torch.tensor([0, 0, 0, 1, 1, 2])]
    share = (scores / beta + of_group) / mask.sum(-1)
    about = reference, reference + share[:, None], scores, torch.arange(6)
    zeros = torch.zeros(6, 4)
    assert gvpo(zeros, mask.float(), groups, *about, beta=beta, per_token=False).abs().max() < 1e-4
    higher = scores.clone()
    higher[1] += 1.0
    about = reference, reference + share[:, None], higher, torch.arange(6)
    found = gvpo(zeros, mask.float(), groups, *about, beta=beta, per_token=False)[:, 0]
    torch.testing.assert_close(found, torch.tensor([-1 / 3, 2 / 3, -1 / 3, 0, 0, 0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("preset", ["online_dpo", "gvpo"])
def test_a_reference_comes_with_it_and_no_critic(preset: str) -> None:
    config = load(Path("configs/quickstart.yaml"), [f"trainer.algorithm={{preset: {preset}}}"])
    assert config.trainer.algorithm.equal_is_idle == (preset == "online_dpo")
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
