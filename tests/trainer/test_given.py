"""`trainer.algorithm.given`: answers that nobody sampled become likelier, and nothing else of a step sees them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from penstock.services.learning.batch import TrainingBatch
from penstock.services.trainer.algorithm_config import AlgorithmConfig
from penstock.services.trainer.algorithms.compose import Algorithm, Part
from penstock.services.trainer.algorithms.totals import Totals
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.described import describe
from penstock.services.trainer.learner import Learner
from tests.trainer.rank_program import a_model
from tests.trainer.steps import a_step, gradient

SIZE = 4
"""Answers of each of `a_step`'s groups."""


def learner(budget: int = 100_000, **algorithm: Any) -> Learner:
    config = {"algorithm": algorithm, "tokens_per_micro_batch": budget}
    return Learner(a_model(), TrainerConfig.model_validate(config), 1.0)


def plain_term(one: Learner, step: TrainingBatch, of_token: Any) -> torch.Tensor:
    """The sum of ``of_token(log π, row)`` over given tokens, by plain transformers."""
    total = torch.zeros(())
    for place in np.flatnonzero(step.given):
        trajectory = step.trajectories[place]
        ids, mask = torch.from_numpy(trajectory.tokens.astype(np.int64)), torch.from_numpy(trajectory.loss_mask[1:])
        logs = one.model(ids[None]).logits[0].float().log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        total = total + (of_token(logs, place) * mask).sum()
    return total


def test_chord_weighs_by_how_unsure_the_policy_is_and_falls() -> None:
    step, plain = a_step(0, given=SIZE), learner()
    how = {"shape": "chord", "coefficient": 2.0, "decay_steps": 4, "final": 0.5}
    one = learner(64, given=how)
    assert [one._config.algorithm.given.at(step) for step in (0, 1, 4, 9)] == [2.0, 1.625, 0.5, 0.5]
    count = sum(t.sampled for t in step.trajectories if t.given)
    wanted = plain_term(plain, step, lambda logs, _: -(logs.exp() * (1 - logs.exp())).detach() * logs) / count
    term = torch.autograd.grad(wanted, list(plain.parameters.values()))
    alone = step.only(np.flatnonzero(~step.given))
    for version in (0, 3):
        one.version, share = version, how["final"] + 1.5 * (1 - version / 4)
        for each in (one, plain):
            each.optimizer.zero_grad(set_to_none=True)
        without, _ = plain.accumulate(alone)
        one.algorithm.given_coefficient = one._config.algorithm.given.at(version)
        found, _ = one.accumulate(step)
        assert found == pytest.approx(without + share * float(wanted.detach()), abs=1e-5)
        for mine, of_policy, its in zip(gradient(one), gradient(plain), term, strict=True):
            torch.testing.assert_close(mine, of_policy + share * its, atol=1e-5, rtol=1e-3)
    trained = learner(given=how)
    trained.train(step)
    assert trained.algorithm.given_coefficient == 2.0
    trained.train(step)
    assert trained.algorithm.given_coefficient == 1.625


@pytest.mark.parametrize("budget", [64, 100_000])
@pytest.mark.parametrize("every", [1, SIZE])
def test_the_term_is_the_mean_over_given_tokens_beside_the_loss_of_what_was_sampled(budget: int, every: int) -> None:
    step, plain = a_step(0, given=every), learner()
    one = learner(budget, given={"coefficient": 0.5})
    count = sum(t.sampled for t in step.trajectories if t.given)
    nll = plain_term(plain, step, lambda logs, _: -logs) / count
    term = torch.autograd.grad(nll, list(plain.parameters.values()))
    alone = step.only(np.flatnonzero(~step.given))
    without = plain.accumulate(alone) if every > 1 else (0.0, {})
    found, metrics = one.accumulate(step)
    assert metrics["given_nll"] == pytest.approx(float(nll.detach()), rel=1e-5)
    assert found == pytest.approx(without[0] + 0.5 * float(nll.detach()), abs=1e-5)
    policy = gradient(plain) or [torch.zeros_like(its) for its in term]
    for mine, of_policy, its in zip(gradient(one), policy, term, strict=True):
        torch.testing.assert_close(mine, of_policy + 0.5 * its, atol=1e-5, rtol=1e-3)
    # Every other metric is of what was sampled: the same as of a step without them, or not there.
    assert metrics.keys() - {"given_nll"} == without[1].keys()
    assert all(metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in without[1].items())


def test_luffy_weighs_by_the_advantage_in_a_group_that_has_them_and_divides_as_the_sampled_ones() -> None:
    """arXiv:2504.14945, its policy shaping: the sum of π / (π + γ) · A, over the count of sampled tokens."""
    step, chosen = a_step(0, given=SIZE), {"advantage": {"type": "grpo", "std": False}}
    one, plain = learner(64, **chosen, given={"shape": "luffy", "compared": True, "gamma": 0.2}), learner(**chosen)
    advantage = step.rewards - np.repeat(step.rewards.reshape(-1, SIZE).mean(-1), SIZE)
    tokens = sum(t.sampled for t in step.trajectories)
    share = sum(t.sampled for t in step.trajectories if not t.given) / tokens
    term = plain_term(plain, step, lambda logs, row: -float(advantage[row]) * logs.exp() / (logs.exp() + 0.2)) / tokens
    its = torch.autograd.grad(term, list(plain.parameters.values()))
    policy = learner(**chosen, given={"compared": True, "coefficient": 0.0})
    without, found = policy.accumulate(step)[0], one.accumulate(step)[0]
    assert found == pytest.approx(share * without + float(term.detach()), abs=1e-6)
    for mine, of_policy, of_given in zip(gradient(one), gradient(policy), its, strict=True):
        torch.testing.assert_close(mine, share * of_policy + of_given, atol=1e-6, rtol=1e-3)


def test_golden_numbers_of_both_shapes() -> None:
    part = Part(
        torch.tensor([[-0.5, -2.0, 0.0]]), torch.zeros(1, 3), torch.tensor([[0.5, 0.5, 0.5]]),
        torch.zeros(1, 3, dtype=torch.bool), given=torch.tensor([[True, True, False]]),
    )  # fmt: skip
    for given, expected in (({"coefficient": 2.0}, 2.5), ({"shape": "luffy", "compared": True}, -0.1194)):
        loss, metrics = Algorithm(AlgorithmConfig.model_validate({"given": given})).loss(
            part, Totals(4.0, 1.0, given=2.0)
        )
        assert float(loss) == pytest.approx(expected, abs=1e-4) and float(metrics["given_nll"]) == pytest.approx(1.25)


def test_what_was_given_is_learned_without_a_reward_and_lowers_nobodys_advantage_unless_it_is_compared() -> None:
    step = a_step(0, given=SIZE)
    step.values["reward"][step.given] = np.nan
    one = learner()
    assert one._learned(step).all() and not one._advantages(step)[0][step.given].any()
    alone = one._advantages(step.only(np.flatnonzero(~step.given)))[0]
    torch.testing.assert_close(one._advantages(step)[0][~step.given][:, : alone.shape[1]], alone)
    luffy = learner(given={"shape": "luffy", "compared": True})
    assert not luffy._learned(step)[step.given].any(), "without a reward there is no advantage to weigh by"


def test_a_steps_metrics_are_of_what_the_policy_said() -> None:
    step, every = a_step(0, given=SIZE), a_step(0, given=1)
    alone = step.only(np.flatnonzero(~step.given))
    found, without = describe(step, 5, True), describe(alone, 5, True)
    given = float(sum(t.sampled for t in step.trajectories if t.given))
    assert found.pop("given_tokens") == given and found.pop("tokens") == without.pop("tokens") + given
    assert found.pop("reward_given") == pytest.approx(float(step.rewards[step.given].mean())) and found == without
    none = describe(every, 5, True)
    assert "response_tokens" not in none and none["lag_max"] == 0 and none["tokens"] == none["given_tokens"]


@pytest.mark.parametrize(("compared", "flat"), [(True, 0.0), (False, 3.0)])
def test_a_group_of_equal_rewards_but_the_given_one_is_learned_from_where_they_are_compared(
    compared: bool, flat: float
) -> None:
    step = a_step(0, given=SIZE)
    step.values["reward"][:] = step.given
    one = learner(given={"shape": "luffy", "compared": True} if compared else {}, advantage={"type": "grpo"})
    assert one._advantages(step)[0].any() == compared
    found = one.train(step)
    assert (found["groups_without_variance"], found["solved_none"]) == (flat, flat / 3)
    assert found["reward"] == 0, "which is the policy's own"


def test_costs_and_shaped_rewards_are_those_of_what_the_policy_said() -> None:
    step = a_step(0, given=SIZE)
    step.values["cost"] = np.where(step.given, np.float32(100), np.float32(1))
    chosen = {"constraints": [{"column": "cost", "limit": 5.0}], "reward_shape": {"scale": 2.0}}
    luffy = learner(given={"shape": "luffy", "compared": True}, advantage={"type": "grpo"}, **chosen)
    alone = learner(advantage={"type": "grpo"}, **chosen)
    found = luffy._advantages(step)[1]
    assert found == alone._advantages(step.only(np.flatnonzero(~step.given)))[1] and luffy.state == alone.state
    before = dict(luffy.state)
    assert "reward_shaped" not in luffy._advantages(step.only(np.flatnonzero(step.given)))[1]
    assert luffy.state == before, "nobody has said anything"


@pytest.mark.parametrize(
    "chosen",
    [{}, {"entropy_share": 0.5}, *({"loss": {"type": name}} for name in ("m2po", "kl_cov", "clip_cov"))],
)
def test_what_was_given_is_learned_though_nothing_sampled_is_left(chosen: dict[str, Any]) -> None:
    step = cut_off(a_step(0, given=SIZE))
    found, metrics = learner(truncated="mask", **chosen).accumulate(step)
    assert found == pytest.approx(metrics["given_nll"]) and found > 0


def cut_off(step: TrainingBatch) -> TrainingBatch:
    """All that was sampled of it."""
    return replace(step, trajectories=[t if t.given else replace(t, finish="length") for t in step.trajectories])


def test_given_answers_weigh_no_more_where_nothing_sampled_is_left() -> None:
    luffy = {"given": {"shape": "luffy", "compared": True}, "truncated": "mask", "advantage": {"type": "grpo"}}
    norms = []
    for step in (a_step(0, given=SIZE), cut_off(a_step(0, given=SIZE))):
        one = learner(**luffy)
        one.accumulate(step)
        norms.append(float(torch.cat([each.flatten() for each in gradient(one)]).norm()))
    assert norms[1] < 5 * norms[0]


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "gpg", "maxrl"])
def test_who_is_left_alone_beside_given_answers_is_compared_with_nobody(advantage: str) -> None:
    step = a_step(0, given=SIZE)
    step.values["reward"][: SIZE - 2] = np.nan
    assert list(step.given[:SIZE]) == [False] * (SIZE - 1) + [True]
    found = learner(advantage={"type": advantage})._advantages(step)[0]
    assert not found[:SIZE].any() and found[SIZE:].any()
    others = step.only(np.arange(SIZE, len(step.trajectories)))
    width = max(len(t.tokens) for t in others.trajectories)
    torch.testing.assert_close(found[SIZE:, :width], learner(advantage={"type": advantage})._advantages(others)[0])


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ({"given": {"shape": "luffy"}}, "shape=luffy weighs .* set compared=true"),
        ({"given": {"compared": True}, "advantage": {"type": "gae"}}, "advantage=gae reads what the policy said"),
        ({"given": {"compared": True}, "kl": {"coefficient": 0.1, "place": "reward"}}, "kl.place=reward reads"),
    ],
)
def test_what_reads_the_policys_words_is_not_compared_with_given_ones(chosen: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        AlgorithmConfig.model_validate(chosen)
