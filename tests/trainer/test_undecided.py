"""`entropy_share`: only the tokens where the policy is most undecided learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.services.modeling.packing import plan_rows
from penstock.services.trainer.algorithm_config import AlgorithmConfig
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from penstock.services.trainer.undecided import most_undecided
from tests.trainer.rank_program import a_model
from tests.trainer.steps import a_step, gradient

PLAIN = {"loss": {"type": "reinforce"}, "correction": {"type": "truncated"}}


def learner(budget: int = 100_000, **algorithm: Any) -> Learner:
    config = {"algorithm": {**PLAIN, **algorithm}, "tokens_per_micro_batch": budget}
    return Learner(a_model(), TrainerConfig.model_validate(config), 1.0)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.floats(0.01, 1.0), st.booleans())
def test_so_many_of_the_sampled_tokens_learn_and_none_is_more_decided_than_one_that_does_not(
    seed: int, rows: int, share: float, ties: bool
) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 30, rows)
    entropies = [random.integers(0, 4, size) / 4 if ties else random.random(size) for size in sizes]
    masks = [random.integers(0, 2, size) for size in sizes]
    masks[0][0] = 1
    found = most_undecided(entropies, masks, share)
    values, sampled, chosen = (np.concatenate(each) for each in (entropies, masks, found))
    assert not chosen[sampled == 0].any() and set(chosen.tolist()) <= {0.0, 1.0}
    least = values[chosen == 1].min()
    assert (values[(sampled == 1) & (chosen == 0)] < least).all()
    wanted = 1 + int(share * (sampled.sum() - 1))
    above = int((values[sampled == 1] > least).sum())
    assert above < wanted <= chosen.sum(), "without those that tie with the last one there would be too few"


def test_the_gradient_is_that_of_the_undecided_tokens_over_the_count_of_all() -> None:
    one, step = learner(entropy_share=0.3), a_step(0)
    advantages = one._advantages(step)[0]
    rows = next(iter(plan_rows(step.trajectories, step.groups, 100_000, torch.device("cpu"))))
    padded = torch.zeros(len(step.trajectories), advantages.shape[1], dtype=torch.float64)
    mask, chosen = padded.bool(), padded.bool()
    every: list[torch.Tensor] = []
    for index, trajectory in enumerate(step.trajectories):  # by plain transformers, a row at a time
        ids = torch.from_numpy(trajectory.tokens.astype(np.int64))
        logs = one.model(ids[None]).logits[0].float().log_softmax(-1)[:-1]
        entropy = -(logs.exp() * logs).sum(-1).detach()
        mask[index, 1 : len(ids)] = torch.from_numpy(trajectory.loss_mask[1:] == 1)
        padded[index, 1 : len(ids)] = entropy.double()
        taken = logs.gather(-1, ids[1:, None])[:, 0]
        weight = (taken.detach() - torch.from_numpy(trajectory.logprobs[1:])).exp().clamp(max=2.0)
        every.append(-advantages[index, 1 : len(ids)] * weight * taken)
    threshold = torch.quantile(padded[mask], 0.7)  # TRL's way to say it
    chosen = mask & (padded >= threshold)
    loss = sum(
        ((values * chosen[index, 1 : len(values) + 1]).sum() for index, values in enumerate(every)), torch.zeros(())
    ) / int(mask.sum())  # fmt: skip
    wanted = torch.autograd.grad(loss, list(one.parameters.values()))
    found, _ = one.accumulate(step)
    assert 0.25 < float(chosen.sum() / mask.sum()) < 0.35 and len(rows.index) == len(step.trajectories)
    assert found == pytest.approx(float(loss.detach()), rel=1e-4)
    for mine, theirs in zip(gradient(one), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("loss", ["ppo_clip", "m2po", "gspo"])
def test_the_undecided_tokens_do_not_depend_on_the_micro_batches(loss: str) -> None:
    chosen = {"loss": {"type": loss}, "correction": {"type": "none"}, "entropy_share": 0.3}
    found = []
    for budget in (64, 100_000):
        one = learner(budget, **chosen)
        found.append((one.accumulate(a_step(0))[0], gradient(one)))
    (value, mine), (other, its) = found
    assert value == pytest.approx(other, abs=1e-5)
    for left, right in zip(mine, its, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-3)


def test_a_share_of_one_takes_no_pass_and_a_smaller_one_a_pass_an_update() -> None:
    for share, passes in ((1.0, 0), (0.5, 1)):
        one, seen = learner(entropy_share=share), 0
        evaluate = one.evaluate

        def counted(*given: Any, plain: Any = evaluate) -> Any:
            nonlocal seen
            seen += 1
            return plain(*given)

        one.evaluate = counted  # type: ignore[method-assign]
        one.train(a_step(0))
        assert seen == passes


def test_a_loss_of_whole_trajectories_has_no_undecided_tokens() -> None:
    with pytest.raises(ValidationError, match=r"loss=geo_mean: .*advantage=gae tells tokens apart"):
        AlgorithmConfig.model_validate({"advantage": {"type": "gae"}, "loss": {"type": "geo_mean"}})
    with pytest.raises(ValidationError, match=r"ratio=interpolated: loss=reinforce has no ratio"):
        AlgorithmConfig.model_validate({"ratio": "interpolated", "loss": {"type": "reinforce"}})
    with pytest.raises(ValidationError, match=r"entropy_share=0.2.*geo_mean"):
        learner(loss={"type": "geo_mean"}, correction={"type": "none"}, entropy_share=0.2)
